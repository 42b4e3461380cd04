"""The state of metrics as a worker of a parameter-server job sends it: one vector for each dtype."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import private_api


def added(before: list[np.ndarray] | None, more: list[np.ndarray]) -> list[np.ndarray]:
    """Adds what came later; there may have been nothing before."""
    return more if before is None else [a + b for a, b in zip(before, more)]


def same(values: Any) -> Any:
    """Copies tensors, for a branch that has to return some of its own."""
    return tf.nest.map_structure(tf.identity, values)


def packed(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """One vector for each dtype: every tensor of a result travels on its own."""
    dtypes = dict.fromkeys(v.dtype for v in values)
    return [tf.concat([tf.reshape(v, [-1]) for v in values if v.dtype == dtype], 0) for dtype in dtypes]


def unpacked(vectors: list[Any], variables: list[Any]) -> list[tf.Tensor]:
    """The tensors that `_packed` packed, in the shapes of some variables."""
    dtypes = [tf.as_dtype(private_api.raw_variable(v).dtype) for v in variables]
    order = list(dict.fromkeys(dtypes))
    values: list[Any] = [None] * len(variables)
    for dtype, vector in zip(order, vectors):
        of_dtype = [i for i, d in enumerate(dtypes) if d == dtype]
        parts = tf.split(vector, [math.prod(variables[i].shape) for i in of_dtype])
        for i, part in zip(of_dtype, parts):
            values[i] = tf.reshape(part, variables[i].shape)
    return values
