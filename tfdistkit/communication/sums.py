"""Reducers without state: the exact average, and ones that trade exactness for fewer bytes or larger steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.reducer import MakeState, Reducer, Wire, times


class Average(Reducer):
    """Computes the gradient of the mean over the global batch: exact, and the default of every strategy."""


class Sum(Reducer):
    """Multiplies the average by the number of replicas, as if the learning rate grew with it.

    Args:
        inner: The compression of the sum. Default: none.
    """

    def __init__(self, inner: Reducer | None = None):
        self.inner = inner or Average()

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        return [times(g, wire.replicas) for g in self.inner.reduce(gradients, variables, state, wire)]

    def build(self, variables: list[Any], make_state: MakeState) -> list[Any] | None:
        return self.inner.build(variables, make_state)

    def choices(self, variables: list[Any]) -> list[str]:
        return [f"Sum({choice})" for choice in self.inner.choices(variables)]

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        self.inner.after_apply(variables, state, wire)

    def check_optimizer(self, optimizer: Any) -> None:
        self.inner.check_optimizer(optimizer)

    def describe(self) -> str:
        return f"Sum({self.inner.describe()})"

    @property
    def needs_processes(self) -> bool:  # type: ignore[override]
        return self.inner.needs_processes

    @property
    def replaces_optimizer(self) -> bool:  # type: ignore[override]
        return self.inner.replaces_optimizer

    @property
    def has_state(self) -> bool:
        return self.inner.has_state


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
        return wire.adasum([times(g, wire.replicas) for g in densify(gradients)], self.dtype)


def densify(gradients: list[Any]) -> list[Any]:
    """Converts IndexedSlices to dense tensors: cheaper for small tables, of which most rows have a gradient."""
    return [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
