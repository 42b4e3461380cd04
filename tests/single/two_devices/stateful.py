"""Stateful recurrent layers, and layers that write their state in a branch or a loop (see `test_two_devices`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdistkit
from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(3).normal(size=(8, 5, 2)).astype("float32")
Y = X[:, 0, :1]
ROWS = np.random.default_rng(0).normal(size=(27, 4)).astype("float32")
TARGETS = (ROWS @ np.arange(1.0, 5.0)[:, None]).astype("float32")

CALLS: dict[str, Callable[..., Any]] = {
    "fit": lambda model: model.fit(X, Y, batch_size=4, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, batch_size=4, verbose=0),
    "predict": lambda model: model.predict(X, batch_size=4, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X[:4], Y[:4]),
    "test_on_batch": lambda model: model.test_on_batch(X[:4], Y[:4]),
    "predict_on_batch": lambda model: model.predict_on_batch(X[:4]),
}


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


def _stateful(scope: Any, wrapped: bool = False) -> Any:
    with scope:
        layer = keras.layers.LSTM(3, stateful=True, name="memory")
        layer = keras.layers.Bidirectional(layer) if wrapped else layer
        model = keras.Sequential([keras.Input(batch_shape=(4, 5, 2)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("call", CALLS)
def test_stateful_layers_are_refused(strategy: Any, call: str) -> None:
    with pytest.raises(UnsupportedError, match="must not be stateful.*'memory'"):
        CALLS[call](_stateful(strategy.scope()))


def test_wrapped_stateful_layers_are_refused(strategy: Any) -> None:
    with pytest.raises(UnsupportedError, match="must not be stateful.*memory"):
        CALLS["fit"](_stateful(strategy.scope(), wrapped=True))


def test_one_replica_may_have_stateful_layers() -> None:
    model = _stateful(tfdistkit.strategy("one_device").scope())
    for call in CALLS.values():
        call(model)


class FromFirstBatch(keras.layers.Layer):
    """Sets its state in a branch: from the first batch, as normalizing flows do, or by sums and means of each."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=self.how == "weight")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def write(self, x: Any) -> Any:
        if self.how in ("mean", "loop"):
            self.scale.assign(0.5 * self.scale + 0.5 * tf.reduce_mean(tf.abs(x), 0))
            self.scale.assign(0.9 * self.scale)  # Reads what was written.
        else:
            self.scale.assign(1.0 / (tf.math.reduce_std(x, 0) + 0.1))
        if self.how != "loop":
            self.total.assign_add(tf.reduce_sum(x * x))
        self.calls.assign_add(1)
        return 0

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            often = self.calls < (3 if self.how == "mean" else 1)
            choose = ops.cond if self.how == "ops" else tf.cond
            if self.how == "loop":
                tf.while_loop(lambda i: i < 3, lambda i: i + 1 + self.write(x), [0])
            else:
                choose(often, lambda: self.write(x), lambda: 0)
        # What a loop writes is that of the batch at the end of the step.
        return x if self.how == "loop" else x * self.scale + 0.001 * self.total


@pytest.mark.parametrize("how", ("state", "ops", "mean", "loop", "weight"))
def test_state_that_a_branch_writes_is_that_of_the_batch(strategy: Any, how: str) -> None:
    """The last batch has one row."""

    def trained(scope: Any) -> list[Any]:
        keras.utils.set_random_seed(2)
        with scope:
            model = keras.Sequential([keras.Input((4,)), FromFirstBatch(how), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.02), "mse")
        history = model.fit(ROWS, TARGETS, batch_size=13, epochs=3, shuffle=False, verbose=0).history
        return [*model.get_weights(), history["loss"]]

    expected = trained(tf.distribute.get_strategy().scope())
    for one, other in zip(trained(strategy.scope()), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
