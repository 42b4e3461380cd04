"""Variables that replicas update alone: which ones, and no others (see `test_two_devices`)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdistkit
from tfdistkit.keras_adapter.fit import build_model

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


@pytest.mark.parametrize("name", ("iteration", "counter"))
def test_a_variable_of_the_user_keeps_its_aggregation(strategy: Any, name: str) -> None:
    with strategy.scope():
        variable = tf.Variable(0, name=name, trainable=False, aggregation=tf.VariableAggregation.SUM)
    tf.function(lambda: strategy.run(lambda: variable.assign_add(tf.constant(1))))()
    assert int(variable.numpy()) == 2


class Least(keras.metrics.Metric):
    """The least error; inherits a `reset_state` that writes zeros."""

    def __init__(self) -> None:
        super().__init__(name="least")
        self.least = self.add_variable((), keras.initializers.Constant(9.0), name="least")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.least.assign(ops.minimum(self.least, ops.min(ops.abs(y_true - y_pred))))

    def result(self) -> Any:
        return self.least + 0.0


@pytest.mark.parametrize("eager", (False, True), ids=("graph", "eager"))
def test_the_first_epoch_begins_with_the_initial_values_of_metrics(strategy: Any, eager: bool) -> None:
    def layer() -> Any:
        return keras.layers.Dense(1, "relu", use_bias=False, kernel_initializer="ones")

    def found(scope: Any) -> list[list[float]]:
        x = np.arange(1.0, 8.0)[:, None].astype("float32")
        with scope:
            models = [keras.Sequential([keras.Input((1,)), layer()]) for _ in range(3)]
            for model in models:
                model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Least()], run_eagerly=eager)
        first, second, third = models
        first.fit(x, 0 * x - 2.0, batch_size=4, epochs=2, verbose=0)
        on_batch = [second.train_on_batch(x, 0 * x - 2.0)[1] for _ in range(2)]
        evaluated = [third.evaluate(x, 0 * x - 2.0, batch_size=4, verbose=0)[1] for _ in range(2)]
        return [first.history.history["least"], [float(one) for one in on_batch], evaluated]

    in_one_process = found(tf.distribute.get_strategy().scope())
    assert in_one_process[0][0] == 3.0
    assert found(strategy.scope()) == in_one_process


def test_the_first_reset_of_metrics_counts_where_a_step_came_before(strategy: Any) -> None:
    with strategy.scope():
        least = Least()
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[least])
    build_model(model, (tf.ones((2, 1)), tf.ones((2, 1))))
    least.least.assign(2.0)  # As `train_on_batch` of Keras 3.10 does, which resets nothing.
    model.reset_metrics()
    assert float(least.least.numpy()) == 0.0


@pytest.mark.parametrize("wrapped", (False, True), ids=("plain", "loss scale"))
def test_the_steps_of_an_optimizer_are_counted_once(strategy: Any, wrapped: bool) -> None:
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        if wrapped:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        weight = keras.Variable([1.0, 2.0])
        optimizer.build([weight])
    tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.constant([1.0, 1.0])], [weight])))()
    assert int(optimizer.iterations) == 1


def test_sums_over_rows_add_up_in_a_loop(strategy: Any) -> None:
    with strategy.scope():
        layer = keras.layers.Layer()
        count = layer.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def step(x: Any) -> None:
        count.assign_add(tf.reduce_sum(tf.cast(x[:, 0] > 0.0, tf.int32)))

    data = tf.data.Dataset.from_tensor_slices(tf.ones((7, 2))).batch(4)
    run = tf.function(lambda x: strategy.run(step, args=(x,)))
    for batch in strategy.experimental_distribute_dataset(data):
        run(batch)
    assert int(count.numpy()) == 7


@pytest.mark.parametrize("mixes_rows", (False, True), ids=("of rows", "of pairs of rows"))
def test_metrics_and_state_of_a_loss_count_each_row_once(strategy: Any, mixes_rows: bool) -> None:
    with strategy.scope():
        total, rows = keras.metrics.Sum(), keras.Variable(0, dtype="int32", trainable=False)

        def loss(y: Any, predicted: Any) -> Any:
            total.update_state(y)
            rows.assign_add(ops.shape(y)[0])
            pairs = ops.square(predicted - ops.transpose(predicted))
            return ops.mean(pairs if mixes_rows else ops.square(y - predicted), axis=-1)

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", loss)
    model.fit(np.ones((21, 2)), np.arange(21.0)[:, None], batch_size=8, epochs=2, verbose=0)
    assert (float(total.result()), int(rows.numpy())) == (2 * 210.0, 2 * 21)


@pytest.mark.parametrize("rows", [5, None])
def test_a_loop_accumulates_the_gradients_of_each_replica(strategy: Any, rows: int | None) -> None:
    def trained(scope: Any) -> Any:
        with scope.scope():
            weight = keras.Variable(np.ones((2, 1), "float32"))
            total = tf.Variable(np.zeros((2, 1), "float32"), trainable=False)
            optimizer = keras.optimizers.SGD(0.1)
            optimizer.build([weight])

        def step(x: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.nn.compute_average_loss(tf.square(x @ weight.value)[:, 0], global_batch_size=rows)
            total.assign_add(tape.gradient(loss, weight.value))

        def update() -> None:
            optimizer.apply([total.read_value()], [weight])

        data = tf.data.Dataset.from_tensor_slices(np.arange(20, dtype="float32").reshape(10, 2) / 20).batch(3)
        for batch in scope.experimental_distribute_dataset(data):
            tf.function(lambda batch: scope.run(step, args=(batch,)))(batch)
        tf.function(lambda: scope.run(update))()
        return weight.numpy()

    np.testing.assert_allclose(trained(strategy), trained(tfdistkit.strategy("one_device")), rtol=1e-6)


class Descending(keras.Model):
    """Updates its weights by itself, and one of them from a moving mean of the same step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 2))
        self.scale = keras.Variable(1.0, name="scale")
        self.mean = keras.Variable(1.0, trainable=False, name="mean")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs) * self.scale

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x) - y))
        weights = self.dense.trainable_variables
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.1 * gradient)
        self.mean.assign(0.5 * self.mean + 0.5 * ops.mean(x))
        self.scale.assign(0.5 + 0.1 * self.mean)
        return {"loss": loss}


@pytest.mark.parametrize("rows", (8, 11))
def test_weights_that_a_step_assigns_equal_one_process(strategy: Any, rows: int) -> None:
    def trained(scope: Any) -> list[Any]:
        keras.utils.set_random_seed(0)
        with scope.scope():
            model = Descending()
            model.compile()
        x = np.random.default_rng(0).normal(size=(rows, 2)).astype("float32")
        model.fit(x, x[:, ::-1], batch_size=4, epochs=2, verbose=0, shuffle=False)
        copies = [np.asarray(v) for v in (model.scale.value, model.dense.kernel.value)]
        return [*copies, *model.get_weights()]

    for one, other in zip(trained(strategy), trained(tfdistkit.strategy("one_device"))):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Remembering(keras.Model):
    """Keeps rows, moving means and averages of weights in variables of its own, as examples of Keras do."""

    def __init__(self, store: str):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.dense.build((None, 3))
        self.store = store
        made = dict(trainable=False, dtype="float32")
        self.queue = keras.Variable(np.zeros((12, 3)), name="queue", **made)
        self.plain = tf.Variable(np.zeros((12, 3), "float32"), trainable=False, name="plain")
        self.mean = keras.Variable(np.zeros(3), name="mean", **made)
        self.seen = tf.Variable(0, trainable=False, name="seen")
        self.kernel = keras.Variable(np.zeros((3, 3)), name="kernel", **made)

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            z = self(x)
            loss = ops.mean(ops.square(z - y)) + 0.1 * ops.mean(ops.square(ops.mean(self.queue, axis=0) - z))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(z, axis=0))
        self.seen.assign_add(tf.shape(x)[0])
        self.kernel.assign(0.9 * self.kernel + 0.1 * self.dense.kernel)
        if self.store.startswith("gathered"):
            z = tfdistkit.collectives.all_gather(z)
        self.remember(z)
        return {"loss": loss}

    def remember(self, z: Any) -> None:
        """Stores rows."""
        rows = ops.shape(z)[0]
        if self.store.endswith("queue"):
            self.queue.assign(ops.concatenate([z, self.queue[:-rows]], axis=0))
        elif self.store.endswith("slices"):
            self.plain.scatter_update(tf.IndexedSlices(z, tf.range(rows)))
        elif self.store.endswith("bank"):
            self.queue.assign(ops.scatter_update(self.queue, ops.arange(rows)[:, None], z))


def _remembered(strategy: Any, store: str, rows: int) -> list[Any]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Remembering(store)
        model.compile(keras.optimizers.SGD(0.1))
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    history = model.fit(x, x, batch_size=4, verbose=0, shuffle=False, epochs=2).history
    kept = (model.queue, model.plain, model.mean, model.seen, model.kernel, *model.weights)
    return [*history["loss"], *(np.asarray(one) for one in kept)]


@pytest.mark.parametrize(
    ("store", "rows"), [("", 8), ("", 11), ("gathered queue", 9), ("gathered slices", 11), ("gathered bank", 8)]
)
def test_state_of_a_model_equals_one_process(strategy: Any, store: str, rows: int) -> None:
    found, expected = _remembered(strategy, store, rows), _remembered(tfdistkit.strategy("one_device"), store, rows)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("store", "rows"), [("queue", 8), ("slices", 11), ("bank", 11)])
def test_rows_of_one_replica_are_not_stored(strategy: Any, store: str, rows: int) -> None:
    with pytest.raises(tfdistkit.errors.UnsupportedError, match="must store those of all replicas"):
        _remembered(strategy, store, rows)
