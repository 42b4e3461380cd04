"""Steps, losses and metrics as users write them, compared with one process (see `test_two_devices`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _one_process import ROWS, TARGETS, batches, require_equal
from _own_steps import strategy
from keras import ops

from tfdistkit.errors import OptionError

__all__ = ["strategy"]  # The fixture.

pytestmark = pytest.mark.tensorflow

CLASSES = np.random.default_rng(1).integers(0, 3, (45, 1)).astype("int32")


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


RATES: dict[str, Callable[[Any, Any], Any]] = {
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

    require_equal(strategy, make, batches(ROWS, TARGETS))


def test_metrics_that_are_built_and_read_in_turn(strategy: Any) -> None:
    def make() -> Any:
        model = InTurn()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        return model

    require_equal(strategy, make, batches(ROWS, TARGETS))


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

    require_equal(strategy, make, batches(ROWS, np.repeat(CLASSES, 2, 1)))


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

    require_equal(strategy, make, batches(ROWS, TARGETS))
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

    require_equal(strategy, make, batches(ROWS, TARGETS), rtol=1e-4)


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

    require_equal(strategy, make, batches(ROWS, CLASSES))


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
        model.evaluate(batches(ROWS), verbose=0)


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

    require_equal(strategy, make, batches(np.stack([ROWS, ROWS], 1), np.stack([TARGETS, TARGETS], 1)))
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


class Divided(keras.Model):
    """A step for TensorFlow's strategies, whose gradients add up."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) / self.distribute_strategy.num_replicas_in_sync
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_step_that_divides_by_the_replicas_is_warned_of(strategy: Any, caplog: Any) -> None:
    with strategy.scope():
        model = Divided()
        model.compile(keras.optimizers.SGD(0.01))
    model.fit(batches(ROWS[:40], TARGETS[:40]), verbose=0)
    warned = [record.message for record in caplog.records if "must not divide by `num_replicas" in record.message]
    assert len(warned) == 1 and "`train_step` reads" in warned[0]
