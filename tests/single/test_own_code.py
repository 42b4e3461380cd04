"""Which models' first steps are compared with one process: those that may combine the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers, ops

from tfdistkit.strategies.step_check.own_code import trains_by_own_code

pytestmark = pytest.mark.tensorflow


def _half(x: Any) -> Any:
    return 0.5 * x


CHECKED: dict[str, Callable[[Any], Any]] = {
    "operations": lambda x: (x - ops.min(x)) / (ops.max(x) - ops.min(x)),
    "operations_in_a_model": lambda x: keras.Sequential([keras.Input((4,)), keras.Model(x, ops.softmax(x, axis=0))])(x),
    "softmax_over_rows": lambda x: layers.Softmax(axis=0)(x),
    "activation": lambda x: layers.Dense(4, activation=_half)(x),
    "activity_regularizer": lambda x: layers.Dense(4, activity_regularizer=lambda h: ops.sum(ops.std(h, axis=0)))(x),
    "lambda": lambda x: layers.Lambda(_half)(x),
}
UNCHECKED: dict[str, Callable[[Any], Any]] = {
    "layers": lambda x: layers.Softmax()(layers.Dense(4, activation="relu", activity_regularizer="l2")(x)),
    "residual": lambda x: x + 2.0 * layers.Dense(4)(x),
}


def _model(make: Callable[[Any], Any]) -> keras.Model:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(make(inputs)))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("make", CHECKED.values(), ids=CHECKED)
def test_models_that_may_combine_rows_are_checked(make: Callable[[Any], Any]) -> None:
    assert trains_by_own_code(_model(make))


@pytest.mark.parametrize("make", UNCHECKED.values(), ids=UNCHECKED)
def test_models_of_rows_alone_are_not_checked(make: Callable[[Any], Any]) -> None:
    assert not trains_by_own_code(_model(make))
