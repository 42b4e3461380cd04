"""Trains a model in one process and on two replicas of this one, and compares all that comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS = np.random.default_rng(0).normal(size=(45, 4)).astype("float32") + 1
TARGETS = (ROWS @ np.arange(1.0, 5.0)[:, None]).astype("float32")


def batches(*tensors: Any) -> tf.data.Dataset:
    """Returns batches of 10, and one of 5, without a static number of rows."""
    return tf.data.Dataset.from_tensor_slices(tensors if len(tensors) > 1 else tensors[0]).batch(10)


def _results(scope: Any, make: Callable[[], Any], data: tf.data.Dataset) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    with scope:
        model = make()
    history = model.fit(data, epochs=2, verbose=0).history
    state = {str(i): np.asarray(v) for i, v in enumerate(getattr(model, "state", []))}
    weights = {f"weight {i}": np.asarray(v) for i, v in enumerate(model.variables) if "seed" not in v.path}
    return {**history, **state, **weights}


def require_equal(strategy: Any, make: Callable[[], Any], data: tf.data.Dataset, rtol: float = 2e-5) -> None:
    """Requires the same curves, weights and variables in `model.state`."""
    alone, together = (_results(scope, make, data) for scope in (contextlib.nullcontext(), strategy.scope()))
    assert together.keys() == alone.keys()
    for name, value in alone.items():
        np.testing.assert_allclose(together[name], value, rtol=rtol, atol=1e-6, err_msg=name)
