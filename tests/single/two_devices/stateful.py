"""Recurrent layers on several replicas: stateful ones, and ones that a step builds (see `test_two_devices`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfdistkit
from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(3).normal(size=(8, 5, 2)).astype("float32")
Y = X[:, 0, :1]

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
