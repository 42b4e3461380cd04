"""Eager steps, whose replicas take turns and may take other branches (see `test_two_devices`)."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistkit
from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(3).normal(size=(8, 4)).astype("float32")
EAGER = pytest.mark.parametrize("eager", (False, True), ids=("graph", "eager"))


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


@pytest.fixture(autouse=True)
def fresh_session() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)


@EAGER
def test_losses_of_layers_are_those_of_the_replica(strategy: Any, eager: bool) -> None:
    def fitted(scope: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        with scope:
            regularized = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.5))
            model = keras.Sequential([keras.Input((4,)), regularized, keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eager)
        model.fit(X, X[:, :1], batch_size=8, epochs=2, verbose=0)
        return model.get_weights()

    expected = fitted(tf.distribute.get_strategy().scope())
    for one, other in zip(fitted(strategy.scope()), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


class KeepsTensors(keras.Model):
    """Its loss reads what `call` left in an attribute, a list and a dictionary; the replicas meet in between."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)
        self.normalize = keras.layers.BatchNormalization(synchronized=True)
        self.kept: dict[str, Any] = {}

    def call(self, x: Any, training: bool | None = None) -> Any:
        self.z = self.kept["z"] = self.hidden(x)
        self.all = [self.z, x]
        return self.last(self.normalize(self.z, training=training))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        own = keras.ops.square(self.z - y) + keras.ops.square(self.kept["z"] + y) + keras.ops.abs(self.all[0] * y)
        return keras.ops.mean(keras.ops.square(y_pred - y)) + keras.ops.mean(own)


@EAGER
@pytest.mark.parametrize("name", ("mirrored", "central_storage"))
def test_the_loss_reads_what_call_kept(strategy: Any, name: str, eager: bool) -> None:
    def fitted(scope: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        with scope:
            model = KeepsTensors()
            model.compile(keras.optimizers.SGD(0.1), run_eagerly=eager)
        model.fit(X, X[:, :1], batch_size=8, epochs=2, verbose=0)
        return model.get_weights()

    expected = fitted(tf.distribute.get_strategy().scope())
    other_strategy = strategy if name == "mirrored" else tfdistkit.strategy(name, devices=2)
    for one, other in zip(fitted(other_strategy.scope()), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_losses_of_layers_can_be_read_after_the_step(strategy: Any) -> None:
    with strategy.scope():
        layer = keras.layers.Dense(3, activity_regularizer="l2")
        layer.build((None, 4))

    def step(x: Any) -> Any:
        layer(x)
        total = tf.distribute.get_replica_context().all_reduce("sum", tf.ones(()))  # The other replica runs.
        return tf.stack([*layer.losses, total])

    halves = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(X[:4] if context.replica_id_in_sync_group == 0 else X[4:])
    )
    results = strategy.experimental_local_results(strategy.run(step, args=(halves,)))
    expected = [float(0.01 * tf.reduce_sum(layer(half) ** 2) / 4) for half in (X[:4], X[4:])]
    np.testing.assert_allclose([float(one[0]) for one in results], expected, rtol=1e-5)
    assert len(layer.losses) == 1


class TwoHeads(keras.Model):
    """Runs one of two layers, by its rows: in Python, so that the other has no gradient."""

    def __init__(self, sparse: bool):
        super().__init__()
        self.table = keras.layers.Embedding(9, 3) if sparse else keras.layers.Dense(3)
        self.other, self.last = keras.layers.Dense(3), keras.layers.Dense(1)
        for layer, width in ((self.table, 4), (self.other, 4), (self.last, 3)):
            layer.build((None, width))

    def call(self, x: Any) -> Any:
        if float(tf.reduce_mean(x)) > 1.0:
            rows = tf.cast(x[:, 0], tf.int32) if isinstance(self.table, keras.layers.Embedding) else x
            return self.last(self.table(rows))
        return self.last(self.other(x))


@pytest.mark.parametrize("sparse", (False, True), ids=("dense", "sparse"))
def test_a_gradient_of_one_replica_alone_counts(strategy: Any, sparse: bool) -> None:
    x = np.concatenate([np.full((4, 4), 3.0), np.full((4, 4), -1.0)]).astype("float32")

    def trained(scope: Any, steps: list[np.ndarray]) -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        with scope.scope():
            model, optimizer = TwoHeads(sparse), keras.optimizers.SGD(0.1, momentum=0.9)

        def step(part: Any) -> None:
            with tf.GradientTape() as tape:
                losses = [tf.reduce_sum(model(one) ** 2) / 8.0 for one in part]
                loss = tf.add_n(losses)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        for batch in steps:
            if scope.num_replicas_in_sync == 1:
                step([tf.constant(batch[:4]), tf.constant(batch[4:])])
            else:
                data = tf.data.Dataset.from_tensors(batch).unbatch().batch(8)
                for parts in scope.experimental_distribute_dataset(data):
                    scope.run(lambda part: step([part]), args=(parts,))
        return model.get_weights()

    expected = trained(tf.distribute.get_strategy(), [x, x])
    for one, other in zip(trained(strategy, [x, x]), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_what_no_replica_has_is_left_alone(strategy: Any) -> None:
    """As in one process, where Adam does not move a variable without a gradient."""
    with strategy.scope():
        model, optimizer = TwoHeads(False), keras.optimizers.AdamW(0.1, weight_decay=0.5)
    before = model.get_weights()

    def step(part: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(part) ** 2) / 8.0
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    strategy.run(step, args=(tf.constant(X),))
    after = model.get_weights()
    changed = [not np.array_equal(one, other) for one, other in zip(before, after)]
    assert changed == [False, False, True, True, True, True]


def test_a_layer_that_cannot_run_on_no_rows_is_explained(strategy: Any) -> None:
    with strategy.scope():
        cell = keras.layers.LSTM(3)
        cell.build((None, 2, 4))
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(np.zeros((1, 2, 4), "float32")))
    with pytest.raises(UnsupportedError, match=r"Replica 1 has no rows of this batch[\s\S]*drop_remainder"):
        for batch in data:
            strategy.run(cell, args=(batch,))


def test_a_replica_without_rows_is_warned_of_in_a_graph(strategy: Any) -> None:
    with strategy.scope():
        dense = keras.layers.Dense(3)
        dense.build((None, 4))
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(np.zeros((1, 4), "float32")))
    with pytest.warns(UserWarning, match=r"Replica 1 has no rows of this batch[\s\S]*drop_remainder"):
        for batch in data:
            tf.function(lambda batch: strategy.run(dense, args=(batch,)))(batch)


class Worst(keras.metrics.Metric):
    """Keeps Python values."""

    def __init__(self) -> None:
        super().__init__(name="worst")
        self.seen: list[float] = []

    def update_state(self, targets: Any, predictions: Any, sample_weight: Any = None) -> None:
        self.seen.append(float(keras.ops.max(predictions)))

    def result(self) -> float:
        return max(self.seen, default=0.0)

    def reset_state(self) -> None:
        self.seen = []


def _measured(scope: Any) -> tuple[Any, ...]:
    keras.utils.set_random_seed(5)
    with scope:
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=[Worst()], run_eagerly=True)
    history = model.fit(X, X[:, :1], batch_size=4, epochs=2, verbose=0, shuffle=False).history
    return history["worst"], model.train_on_batch(X, X[:, :1]), model.evaluate(X, X[:, :1], verbose=0)


@pytest.mark.parametrize("name", ("one_device", "mirrored"))
def test_metrics_may_keep_python_values(strategy: Any, name: str) -> None:
    expected = _measured(tf.distribute.get_strategy().scope())
    own = strategy if name == "mirrored" else tfdistkit.strategy(name)
    for one, other in zip(_measured(own.scope()), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_metrics_forget_what_they_were_built_from(strategy: Any) -> None:
    class Kept(Worst):
        def update_state(self, targets: Any, predictions: Any, sample_weight: Any = None) -> None:
            self.seen.append(predictions)

        def result(self) -> float:
            return float(keras.ops.max(self.seen[-1]))

    with tfdistkit.strategy("one_device").scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[metric := Kept()], run_eagerly=True)
    model.train_on_batch(X, X[:, :1])
    assert [tf.is_symbolic_tensor(one) for one in metric.seen] == [False]


class Counting(keras.Model):
    """A step that counts in Python."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        self.steps += 1
        return super().train_step(data)


@EAGER
def test_numbers_of_python_that_a_step_changes_are_told(strategy: Any, eager: bool) -> None:
    with strategy.scope():
        model = Counting()
        model.compile("sgd", "mse", run_eagerly=eager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, X[:, :1], batch_size=2, verbose=0)
    told = [str(one.message) for one in caught if "should not change numbers of Python" in str(one.message)]
    assert len(told) == eager and all("`steps` of 'counting'" in one for one in told)
