"""Branches of a step, and of functions outside of steps, which AutoGraph converts (see `test_two_devices`)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdistkit
from tfdistkit.errors import UnsupportedError
from tfdistkit.strategies.sync.aggregates import global_conditions

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(0).normal(size=(39, 4)).astype("float32")
Y = (X @ np.arange(1.0, 5.0)[:, None]).astype("float32")


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


def _with_tensors(x: Any) -> Any:
    """Chooses by a tensor: AutoGraph must convert it where a branch calls it."""
    if tf.reduce_sum(x) > 3.0:
        x = 2.0 * x
    for i in tf.range(3):
        x = x + tf.cast(i, x.dtype)
    return x


@tf.function
def _in_branches(x: Any) -> Any:
    if tf.reduce_sum(x) > 0.0:
        first = _with_tensors(x)
    else:
        first = x
    return first, tf.cond(tf.reduce_sum(x) > 1.0, lambda: _with_tensors(x), lambda: x)


def test_functions_that_branches_call_are_converted(strategy: Any) -> None:
    for one in _in_branches(tf.constant([2.0, 3.0])):
        np.testing.assert_array_equal(one, [7.0, 9.0])


class Chosen(keras.Model):
    """Chooses what it does by numbers of the batch."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.out = how, keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            error = ops.square(y - self(x))
            loss = ops.mean(error)
            if self.how == "any":
                loss = tf.cond(tf.reduce_any(error > 40.0), lambda: tf.reduce_mean(2.0 * error), lambda: loss)
            if self.how == "nested":
                loss = ops.cond(
                    loss > 9.0, lambda: 3 * loss, lambda: ops.cond(2 * loss > 9.0, lambda: 2 * loss, lambda: loss)
                )
        gradients = tape.gradient(loss, weights)
        if self.how in ("applied", "by_a_row"):
            condition = loss > 4.0 if self.how == "applied" else x[0, 0] > 0.0

            def apply() -> Any:
                self.optimizer.apply(gradients, weights)
                return 1.0

            return {"loss": loss, "applied": tf.cond(condition, apply, lambda: 0.0)}
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


@pytest.mark.parametrize("how", ("any", "nested", "applied"))
def test_replicas_take_the_branch_of_one_process(strategy: Any, how: str) -> None:
    def trained(scope: Any) -> list[Any]:
        with scope:
            model = Chosen(how)
            model(X[:1])
            model.compile(keras.optimizers.SGD(0.03))
            model.optimizer.build(model.trainable_variables)
        history = model.fit(X, Y, batch_size=13, epochs=4, shuffle=False, verbose=0).history
        return [*model.get_weights(), history["loss"]]

    expected = trained(tf.distribute.get_strategy().scope())
    for one, other in zip(trained(strategy.scope()), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_updates_in_a_branch_chosen_by_rows_are_refused(strategy: Any) -> None:
    """A replica would wait for those that take the other branch."""
    with strategy.scope():
        model = Chosen("by_a_row")
        model(X[:1])
        model.compile(keras.optimizers.SGD(0.03))
    with pytest.raises(UnsupportedError, match="A branch that each replica chooses by its own rows must not update"):
        model.fit(X, Y, batch_size=13, verbose=0)
    assert int(model.optimizer.iterations) == 0


class Median(keras.Model):
    """Evaluates by a median of the rows, and by a constant, a variable, that counts once a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.median, self.constant = keras.metrics.Mean(name="median"), keras.metrics.Sum(name="constant")
        self.two = self.add_weight(shape=(), initializer=keras.initializers.Constant(2.0), trainable=False)

    def test_step(self, data: Any) -> Any:
        x, _ = data
        self.median.update_state(ops.median(x[:, 0]))
        self.constant.update_state(ops.convert_to_tensor(self.two))
        return {"median": self.median.result(), "constant": self.constant.result()}


def test_numbers_of_rows_in_a_test_step(strategy: Any) -> None:
    with strategy.scope():
        model = Median()
        model.compile()
    with pytest.warns(UserWarning, match=r"'median' in `test_step` compares rows \(the largest of all of them"):
        logs = model.evaluate(X, Y, batch_size=13, verbose=0, return_dict=True)
    assert logs["constant"] == 2.0 * 3


def test_branches_of_libraries_stay(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some depend on whether a replica has rows; and each would take a collective more in every step."""
    found: list[Any] = []
    original = global_conditions._of_global_batch
    monkeypatch.setattr(global_conditions, "_of_global_batch", lambda *args: found.append(args) or original(*args))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse", metrics=["mae"])
    model.fit(X, Y, batch_size=19, verbose=0)
    assert not found
