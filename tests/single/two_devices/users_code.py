"""Steps, metrics, optimizers and variables as users write them, compared with one process (see `test_two_devices`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdistkit
from tfdistkit.errors import OptionError

pytestmark = pytest.mark.tensorflow

ROWS = np.random.default_rng(0).normal(size=(45, 4)).astype("float32") + 1
TARGETS = (ROWS @ np.arange(1.0, 5.0)[:, None]).astype("float32")
CLASSES = np.random.default_rng(1).integers(0, 3, (45, 1)).astype("int32")


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


def _batches(*tensors: Any) -> tf.data.Dataset:
    """Batches of 10, and one of 5, without a static number of rows."""
    return tf.data.Dataset.from_tensor_slices(tensors if len(tensors) > 1 else tensors[0]).batch(10)


def _results(scope: Any, make: Callable[[], Any], data: tf.data.Dataset) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    with scope:
        model = make()
    history = model.fit(data, epochs=2, verbose=0).history
    state = {str(i): np.asarray(v) for i, v in enumerate(getattr(model, "state", []))}
    weights = {f"weight {i}": np.asarray(v) for i, v in enumerate(model.variables) if "seed" not in v.path}
    return {**history, **state, **weights}


def _require_equal(strategy: Any, make: Callable[[], Any], data: tf.data.Dataset, rtol: float = 2e-5) -> None:
    alone, together = (_results(scope, make, data) for scope in (contextlib.nullcontext(), strategy.scope()))
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        np.testing.assert_allclose(together[name], value, rtol=rtol, atol=1e-6, err_msg=name)


class Step(keras.Model):
    """A step of one's own that writes variables of TensorFlow's, made as a kind of them is."""

    zero: Any = 0

    def __init__(self, **options: Any):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = tf.Variable(self.zero, **options)
        self.moving = tf.Variable(tf.zeros([4]), **options)
        self.chance = tf.Variable(0.7, **options)
        self.state = [self.seen, self.moving, self.chance]

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - y
            loss = tf.reduce_mean(error**2) + 0.01 * self.chance
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.seen.assign_add(tf.shape(x)[0])
        self.moving.assign(0.9 * self.moving + 0.1 * tf.reduce_mean(x, 0))
        # A clip, as in adaptive augmentation: no mean over rows.
        right = tf.reduce_mean(tf.sign(error))
        self.chance.assign(tf.clip_by_value(self.chance + right / 2, 0.0, 1.0))
        return {"loss": loss}


READ = tf.VariableSynchronization.ON_READ
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "summed": {"trainable": False, "aggregation": tf.VariableAggregation.SUM},
    "of the first": {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA},
    "first, on read": {
        "trainable": False,
        "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
        "synchronization": READ,
    },
    "mean, on read": {"trainable": False, "aggregation": tf.VariableAggregation.MEAN, "synchronization": READ},
}


@pytest.mark.parametrize("kind", KINDS)
def test_variables_of_tensorflow(strategy: Any, kind: str) -> None:
    """Whatever they are said to be, one process knows one value; without words they are trainable, integers too."""

    def make() -> Any:
        options = dict(KINDS[kind])
        model = Step(**options) if "mean" not in kind else FloatStep(**options)
        model.compile(keras.optimizers.SGD(0.01))
        return model

    _require_equal(strategy, make, _batches(ROWS, TARGETS))


class FloatStep(Step):
    """The same with a count in floats: integers have no mean."""

    zero = 0.0

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.seen.assign_add(tf.reduce_sum(x))
        self.moving.assign(0.9 * self.moving + 0.1 * tf.reduce_mean(x, 0))
        self.chance.assign(tf.clip_by_value(self.chance + tf.reduce_mean(x) / 2, 0.0, 1.0))
        return {"loss": loss}


@pytest.mark.parametrize("aggregation", ["sum", "only_first_replica"])
def test_aggregations_of_weights_of_keras(strategy: Any, aggregation: str) -> None:
    class Watching(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            options = {"initializer": "zeros", "trainable": False, "aggregation": aggregation}
            self.mean = self.add_weight(shape=(4,), name="mean", **options)
            self.total = self.add_weight(shape=(4,), name="total", **options)
            self.steps = self.add_weight(shape=(), name="steps", **options)

        def call(self, x: Any) -> Any:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            self.total.assign_add(ops.sum(x, axis=0))
            self.steps.assign_add(1.0)
            return x

    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), Watching(name="watching"), keras.layers.Dense(1, name="dense")])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    _require_equal(strategy, make, _batches(ROWS, TARGETS))


RATES: dict[str, Callable[[Any, Any], Any]] = {
    "linear": lambda rate, loss: 0.01 * loss,
    "quotient": lambda rate, loss: 0.05 / (1.0 + loss),
    "choice": lambda rate, loss: tf.where(loss > 1.0, rate / 1.5, rate * 1.5),
}


@pytest.mark.parametrize("kind", RATES)
def test_learning_rate_that_a_step_computes(strategy: Any, kind: str) -> None:
    class Adapting(InTurn):
        def train_step(self, data: Any) -> dict[str, Any]:
            logs = super().train_step(data)
            rate = self.optimizer.learning_rate
            rate.assign(RATES[kind](tf.convert_to_tensor(rate), tf.reduce_mean(tf.abs(self(data[0]) - data[1]))))
            return {**logs, "rate": tf.convert_to_tensor(rate)}

    def make() -> Any:
        model = Adapting()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    _require_equal(strategy, make, _batches(ROWS, TARGETS))


class Accumulating(keras.Model):
    """Applies gradients in a branch, every second step, clipped by their norm: of this step, or of both."""

    def __init__(self, accumulates: bool):
        super().__init__()
        self.dense, self.accumulates = keras.layers.Dense(1), accumulates
        self.count = tf.Variable(0, trainable=False)
        self.dense.build((None, 4))
        self.sums = [tf.Variable(tf.zeros(one.shape), trainable=False) for one in self.dense.trainable_variables]

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients):
            total.assign_add(gradient)
        self.count.assign_add(1)

        def update() -> None:
            given = [tf.convert_to_tensor(one) for one in self.sums] if self.accumulates else gradients
            clipped, _ = tf.clip_by_global_norm(given, 0.5)
            self.optimizer.apply_gradients(zip(clipped, self.trainable_variables))
            for total in self.sums:
                total.assign(tf.zeros_like(total))

        tf.cond(self.count % 2 == 0, update, lambda: None)
        return {"loss": loss}


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_that_a_branch_clips(strategy: Any, accumulates: bool) -> None:
    def make() -> Any:
        model = Accumulating(accumulates)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    _require_equal(strategy, make, _batches(ROWS, TARGETS))


class InTurn(keras.Model):
    """Updates and reads one metric after the other: those of `compile` are built in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        logs = {}
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
                logs["loss"] = metric.result()
            else:
                metric.update_state(y, predicted)
                logs.update(metric.result())
        return logs


def test_metrics_that_are_built_and_read_in_turn(strategy: Any) -> None:
    def make() -> Any:
        model = InTurn()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return model

    _require_equal(strategy, make, _batches(ROWS, TARGETS))


def _masked_loss(labels: Any, predicted: Any) -> Any:
    """A loss of TensorFlow's tutorials: labels of any shape let TensorFlow add an assertion."""
    mask = labels != 0
    each = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)(labels, predicted)
    mask = tf.cast(mask, each.dtype)
    return tf.reduce_sum(each * mask) / tf.reduce_sum(mask)


def test_assertions_before_and_after_a_sum_over_the_replicas(strategy: Any) -> None:
    """They are in the loss, and in a metric that gets the rows of all replicas; this hung."""

    def make() -> Any:
        one = keras.Input((4,))
        model = keras.Model(one, keras.layers.Reshape((2, 3))(keras.layers.Dense(6, name="dense")(one)))
        model.compile(keras.optimizers.SGD(0.01), loss=_masked_loss, metrics=[_masked_loss])
        return model

    _require_equal(strategy, make, _batches(ROWS, np.repeat(CLASSES, 2, 1)))


def test_prints_before_and_after_a_sum_over_the_replicas(strategy: Any, capfd: pytest.CaptureFixture) -> None:
    class Printing(InTurn):
        def train_step(self, data: Any) -> dict[str, Any]:
            tf.print("before")
            logs = super().train_step(data)
            tf.print("after")
            return logs

    def make() -> Any:
        model = Printing()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return model

    _require_equal(strategy, make, _batches(ROWS, TARGETS))
    printed = capfd.readouterr().err.split()
    assert printed.count("before") == printed.count("after") == 3 * 2 * 5  # One process and two replicas.


def test_scales_of_float8_are_those_of_all_rows(strategy: Any) -> None:
    """Keras assigns their gradients, which are extremes over the rows."""

    def make() -> Any:
        one = keras.Input((4,))
        model = keras.Model(one, keras.layers.Dense(1, kernel_initializer="ones", name="dense")(one))
        model.quantize("float8")
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    _require_equal(strategy, make, _batches(ROWS, TARGETS), rtol=1e-4)


def test_optimizer_with_variables_of_tensorflow(strategy: Any) -> None:
    class Remembering(keras.optimizers.SGD):
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.before = [tf.Variable(tf.convert_to_tensor(one), trainable=False) for one in variables]
            for one in self.before:
                self._track_variable(one)

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            before = self.before[self._get_variable_index(variable)]
            before.assign(0.5 * before + 0.5 * tf.convert_to_tensor(variable))
            self.assign(variable, before - learning_rate * gradient)

    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="dense")])
        model.compile(Remembering(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    _require_equal(strategy, make, _batches(ROWS, TARGETS))


class Precision(keras.metrics.Metric):
    """Counts in a loop of a tf.function, as those do who come from TensorFlow."""

    def __init__(self) -> None:
        super().__init__(name="precision")
        self.right = self.add_weight(name="right", initializer="zeros")
        self.wrong = self.add_weight(name="wrong", initializer="zeros")

    @tf.function
    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        y, predicted = tf.reshape(y, [-1]), tf.argmax(predicted, -1, "int32")
        for one in range(tf.reduce_max(y) + 1):
            self.right.assign_add(tf.reduce_sum(tf.cast((y == one) & (predicted == one), "float32")))
            self.wrong.assign_add(tf.reduce_sum(tf.cast((y != one) & (predicted == one), "float32")))

    def result(self) -> Any:
        return self.right / (self.right + self.wrong + 1e-7)


def test_metric_that_counts_in_a_loop(strategy: Any) -> None:
    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=[Precision()])
        return model

    _require_equal(strategy, make, _batches(ROWS, CLASSES))


class Pairs(keras.Model):
    """Evaluates the loss of each row against all others."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.mean = keras.layers.Dense(3), keras.metrics.Mean(name="loss")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, x: Any) -> dict[str, Any]:
        products = tf.matmul(self(x), self(x), transpose_b=True)
        self.mean.update_state(tf.reduce_logsumexp(products, 1) - tf.linalg.diag_part(products))
        return {"loss": self.mean.result()}


def test_rows_that_are_compared_for_a_metric_are_told(strategy: Any) -> None:
    with strategy.scope():
        model = Pairs()
        model.compile()
    with pytest.warns(UserWarning, match="the metric 'loss' in `test_step` compares rows"):
        model.evaluate(_batches(ROWS), verbose=0)


class Positions(keras.layers.Layer):
    """Adds a position to each token, broadcast as in Keras's own language models."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(2, 4), name="table")

    def call(self, x: Any) -> Any:
        return x + ops.broadcast_to(self.table, ops.shape(x))


def test_a_broadcast_table_is_no_fixed_number_of_rows(strategy: Any, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        model = keras.Sequential([keras.Input((None, 4)), Positions(name="positions"), keras.layers.Dense(1, name="d")])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    _require_equal(strategy, make, _batches(np.stack([ROWS, ROWS], 1), np.stack([TARGETS, TARGETS], 1)))
    assert "fixed number of rows" not in caplog.text


class Anchors(keras.Model):
    """Takes a batch apart by its first dimension, which holds anchors and positives in place of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.dense.build((None, 4))

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(data[0]) - self.dense(data[1])) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_pairs_in_place_of_rows_are_explained(strategy: Any) -> None:
    with strategy.scope():
        model = Anchors()
        model.compile(keras.optimizers.SGD(0.01))
    pairs = tf.data.Dataset.from_tensor_slices(ROWS[:40].reshape(5, 2, 4, 4))
    with pytest.raises(OptionError, match="(?s)row of the batch by its number.*slice index 1.*make a tuple of tensors"):
        model.fit(pairs, verbose=0)
