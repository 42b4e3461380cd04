"""The check of a first step: state that layers write, and numbers in logs (see `test_two_devices`)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _own_steps import Own, X, Y, checks, compiled, each, fresh_session, strategy
from keras import layers, ops

import tfdistkit
from tfdistkit.errors import UnsupportedError

__all__ = ["checks", "fresh_session", "strategy"]  # The fixtures.

pytestmark = pytest.mark.tensorflow


class Writing(layers.Layer):
    """A layer that writes what a function makes of the state before and of the rows."""

    def __init__(self, written: Callable[[Any, Any], Any], dtype: str = "float32"):
        super().__init__()
        self.written, self.dtype_of_state = written, dtype

    def build(self, shape: Any) -> None:
        sizes = (shape[-1],) if self.dtype_of_state == "float32" else ()
        self.state = self.add_weight(shape=sizes, dtype=self.dtype_of_state, initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        self.state.assign(self.written(self.state, x))
        return x


def means_of_classes(state: Any, x: Any) -> Any:
    classes, places, counts = tf.unique_with_counts(tf.cast(x[:, 0] * 2, tf.int32))
    sums = tf.math.unsorted_segment_sum(x, places, tf.size(classes))
    return tf.reduce_mean(sums / tf.cast(counts, tf.float32)[:, None], 0)


def most_of_classes(state: Any, x: Any) -> Any:
    classes, places = tf.unique(tf.cast(x[:, 0] * 2, tf.int32))
    return tf.reduce_mean(tf.math.unsorted_segment_max(x, places, tf.size(classes)), 0)


def product(state: Any, x: Any) -> Any:
    return tf.math.unsorted_segment_prod(x, tf.zeros(tf.shape(x)[0], tf.int32), 1)[0]


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "means_of_classes": (means_of_classes, "float32"),
    "most_of_classes": (most_of_classes, "float32"),
    "product": (product, "float32"),
    "variance": (lambda state, x: 0.9 * state + 0.1 * ops.var(x, axis=0), "float32"),
    "slow_variance": (lambda state, x: 0.999 * (state + 1.0) + 0.001 * ops.var(x, axis=0) - 1.0, "float32"),
    "number_of_classes": (lambda state, x: tf.size(tf.unique(tf.cast(x[:, 0] * 2, tf.int32))[0]), "int32"),
}


def model_of(strategy: Any, written: Callable[[Any, Any], Any], dtype: str) -> Any:
    def make() -> Any:
        return keras.Sequential([keras.Input((6,)), Writing(written, dtype), layers.Dense(2)])

    return compiled(strategy, make, "sgd", "mse")


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_no_graph_shows_is_refused_before_the_first_step(
    strategy: Any, checks: list[str], name: str
) -> None:
    model = model_of(strategy, *REFUSED[name])
    with pytest.raises(UnsupportedError, match="must write the state of one process.*`sequential/writing/variable`"):
        model.fit(X, Y, batch_size=13, verbose=0)
    assert checks == ["different"]
    assert int(model.optimizer.iterations) == 0


ACCEPTED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "mean": (lambda state, x: 0.9 * state + 0.1 * ops.mean(x, axis=0), "float32"),
    "centred": (lambda state, x: state + ops.mean(x - tf.stop_gradient(ops.mean(x, axis=0)), axis=0), "float32"),
    "sum": (lambda state, x: state + ops.sum(x, axis=0), "float32"),
    "most": (lambda state, x: ops.maximum(state, ops.max(x, axis=0)), "float32"),
    "rows": (lambda state, x: state + ops.shape(x)[0], "int32"),
    "steps": (lambda state, x: state + 1, "int32"),
    "noise": (lambda state, x: tf.random.normal(tf.shape(state)), "float32"),
    "counts": (
        lambda state, x: state + tf.cast(tf.math.bincount(tf.cast(x[:, 0] > 0, tf.int32), None, 6, 6), tf.float32),
        "float32",
    ),
    "gathered": (lambda state, x: ops.var(tfdistkit.collectives.all_gather(x), axis=0), "float32"),
}


# Their relatives are tested each time.
_THOROUGH = ("most", "rows", "steps", "largest_integer", "pairs", "mean")


def _some(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name in _THOROUGH)) for name in names]


@pytest.mark.parametrize("name", _some(ACCEPTED))
def test_exact_state_passes(strategy: Any, checks: list[str], name: str) -> None:
    model = model_of(strategy, *ACCEPTED[name])
    model.fit(X, Y, batch_size=5, verbose=0)
    assert checks == ["equal"]
    assert model.layers[0].state.numpy().any() or name == "centred"  # The check itself has written nothing, twice.
    if name == "rows":
        assert int(model.layers[0].state) == len(X)


class Logging(Own):
    """A model whose train step logs another number."""

    def __init__(self, number: Callable[[Any], Any]):
        super().__init__(lambda x, y, p: ops.mean(each(y, p)), regularize=False)
        self.number = number

    def train_step(self, data: Any) -> Any:
        return {**(super().train_step(data) or {}), "own": self.number(self(data[0]))}


NUMBERS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "median": (lambda p: ops.median(p[:, 0]), False),
    "pairs": (lambda p: ops.mean(ops.square(p[:, 0][:, None] - p[:, 0])), False),
    "largest": (lambda p: tf.math.top_k(p[:, 0], 3)[0], False),
    "largest_integer": (lambda p: tf.reduce_max(tf.cast(p[:, 0] * 100, tf.int32)), False),
    "rows": (lambda p: p[:, 0], True),
    "count": (lambda p: tf.shape(p)[0], True),
    "mean": (lambda p: ops.mean(p), True),
    "deviation": (lambda p: ops.std(p), True),
    "constant": (lambda p: tf.constant(0.3), True),
}


@pytest.mark.parametrize("name", _some(NUMBERS))
def test_a_number_in_the_logs_of_one_replica_is_a_warning(strategy: Any, checks: list[str], name: str) -> None:
    number, is_exact = NUMBERS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(strategy, lambda: Logging(number)).fit(X, Y, batch_size=13, verbose=0)
    texts = [str(one.message) for one in caught if "should be that of one process" in str(one.message)]
    assert checks == ["equal"]
    assert len(texts) == (not is_exact)
    assert is_exact or "'own'" in texts[0]


def median_of_rows(errors: Any) -> Any:
    return ops.stop_gradient(ops.median(errors))


RATES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "constant": (lambda errors: 1.0, True),
    "mean": (lambda errors: ops.stop_gradient(ops.mean(errors)), True),
    "median": (median_of_rows, False),
}


@pytest.mark.parametrize("name", RATES)
def test_a_learning_rate_that_follows_rows(strategy: Any, checks: list[str], name: str) -> None:
    rate, is_exact = RATES[name]

    class Following(Own):
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            self.optimizer.learning_rate.assign(0.01 * rate(each(data[1], self(data[0]))))
            return logs

    model = compiled(strategy, lambda: Following(lambda x, y, p: ops.mean(each(y, p)), regularize=False))
    with contextlib.nullcontext() if is_exact else pytest.raises(UnsupportedError, match="learning_rate"):
        model.fit(X, Y, batch_size=13, verbose=0)
    assert checks == ["equal" if is_exact else "different"]


def test_a_number_that_a_metric_gets_is_a_warning(strategy: Any, checks: list[str]) -> None:
    class Tracking(Own):
        def __init__(self) -> None:
            super().__init__(lambda x, y, p: ops.mean(each(y, p)), regularize=False)
            self.hardest, self.mean = keras.metrics.Mean("hardest"), keras.metrics.Mean("mean")

        def train_step(self, data: Any) -> Any:
            logs, errors = super().train_step(data), each(data[1], self(data[0]))
            self.hardest.update_state(ops.median(errors))
            self.mean.update_state(ops.mean(errors))
            return logs

    with pytest.warns(UserWarning, match=r"'hardest/.*should be that of one process"):
        compiled(strategy, Tracking).fit(X, Y, batch_size=13, verbose=0)
    assert checks == ["equal"]


@pytest.mark.parametrize("loss", ("circle", "pairs"))
def test_losses_with_the_rows_of_all_replicas_give_no_warning(strategy: Any, loss: str) -> None:
    class Pairs(keras.losses.Loss):
        def call(self, y: Any, p: Any) -> Any:
            return ops.mean(ops.square(p[:, 0][:, None] - p[:, 0]), axis=1)

    def make() -> Any:
        return keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.UnitNormalization()])

    chosen = keras.losses.Circle() if loss == "circle" else Pairs()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="A loss in a step compares rows")
        compiled(strategy, make, "sgd", chosen).fit(X, np.arange(13) % 3, batch_size=13, verbose=0)


def test_without_the_check_state_is_the_mean_of_the_replicas(checks: list[str]) -> None:
    unchecked = tfdistkit.strategy("mirrored", devices=2, check_step=False)
    model = model_of(unchecked, *REFUSED["variance"])
    model.fit(X[:12], Y[:12], batch_size=12, verbose=0, shuffle=False)
    expected = 0.1 * (X[:6].var(0) + X[6:12].var(0)) / 2
    np.testing.assert_allclose(model.layers[0].state.numpy(), expected, rtol=1e-5)
