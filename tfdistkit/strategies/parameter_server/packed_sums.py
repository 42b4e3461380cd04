"""Packs the state of metrics into one vector for each dtype, which a worker sends to the coordinator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import private_api


def added(before: list[np.ndarray] | None, more: list[np.ndarray]) -> list[np.ndarray]:
    """Adds arrays elementwise to earlier sums, or returns them if there are none."""
    return more if before is None else [a + b for a, b in zip(before, more)]


def same(values: Any) -> Any:
    """Copies tensors, for a branch that must return new tensors."""
    return tf.nest.map_structure(tf.identity, values)


def packed(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenates tensors into one vector for each dtype: each tensor of a result costs a message."""
    dtypes = dict.fromkeys(v.dtype for v in values)
    return [tf.concat([tf.reshape(v, [-1]) for v in values if v.dtype == dtype], 0) for dtype in dtypes]


def unpacked(vectors: list[Any], variables: list[Any]) -> list[tf.Tensor]:
    """Returns the tensors that `packed` packed, in the shapes of the variables."""
    dtypes = [tf.as_dtype(private_api.raw_variable(v).dtype) for v in variables]
    order = list(dict.fromkeys(dtypes))
    values: list[Any] = [None] * len(variables)
    for dtype, vector in zip(order, vectors):
        of_dtype = [i for i, d in enumerate(dtypes) if d == dtype]
        parts = tf.split(vector, [math.prod(variables[i].shape) for i in of_dtype])
        for i, part in zip(of_dtype, parts):
            values[i] = tf.reshape(part, variables[i].shape)
    return values
