"""Reducers without state: the exact average, and what trades exactness for bytes or for larger steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.reducer import Reducer, Wire


class Average(Reducer):
    """The gradient of the mean over the global batch: exact, and what every strategy does by default."""


class Sum(Reducer):
    """The average times the number of replicas, as a learning rate that grows with them.

    Args:
        inner: How the sum travels. Default: as it is.
    """

    def __init__(self, inner: Reducer | None = None):
        self.inner = inner or Average()

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        return self.inner.reduce(scale(gradients, wire.replicas), variables, state, wire)


class FP16(Reducer):
    """Sends gradients as float16: half the bytes, 11 bits of precision; values above 65,504 overflow."""

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        return wire.sum_as(gradients, tf.float16)


class BF16(Reducer):
    """Sends gradients as bfloat16: half the bytes, 8 bits of precision, the range of float32."""

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        return wire.sum_as(gradients, tf.bfloat16)


class Adasum(Reducer):
    """Averages parallel gradients and sums orthogonal ones (https://arxiv.org/abs/2006.02924).

    Args:
        dtype: The dtype on the wire. Default: that of the gradients.
    """

    def __init__(self, dtype: Any = None):
        self.dtype = dtype

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        return wire.adasum(scale(densify(gradients), wire.replicas), self.dtype)


def scale(gradients: list[Any], factor: float) -> list[Any]:
    """Multiplies gradients, dense or IndexedSlices, by a number."""
    return [
        tf.IndexedSlices(g.values * tf.cast(factor, g.dtype), g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else g * tf.cast(factor, g.dtype)
        for g in gradients
    ]


def densify(gradients: list[Any]) -> list[Any]:
    """Converts IndexedSlices to dense tensors: cheaper for small tables, of which most rows have a gradient."""
    return [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
