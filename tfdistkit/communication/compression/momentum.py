"""The reducer of `OneBitAdam` and `QAdam`: after their first steps, momentum travels in place of gradients."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import tensorflow as tf

from tfdistkit.communication.compression.compression import flatten, unflatten
from tfdistkit.communication.compression.scatter_gather import Quantizer, sum_quantized
from tfdistkit.communication.reducer import MakeState, Reducer, Wire


class FrozenOptimizer(Protocol):
    """What the reducer needs to know of its optimizer.

    Attributes:
        beta_1: The decay of the momentum.
    """

    beta_1: float

    def is_exact(self) -> tf.Tensor:
        """Returns whether this step is one of the first, in which gradients are summed exactly."""

    def momentum_of(self, variable: Any) -> Any:
        """Returns the momentum of a variable; None for a variable that is overwritten by its gradient."""

    def unit_of(self, variable: Any) -> tf.Tensor:
        """Returns the momentum that moves each number of a variable by the learning rate."""

    def reach(self) -> float:
        """Returns by how many learning rates a number moves at most in a step."""


class MomentumReducer(Reducer):
    """Sums gradients in the first steps, and quantized momentum afterwards.

    Each replica adds its part of the gradient to its share of the momentum, which is the same on all replicas. What
    travels is the result in units of what it moves the variable by, so that numbers of all variables have one size,
    and a block has nothing in it that would drown the others. What quantizing changed is added in the next step.

    The optimizer gets the gradient that changes its momentum into the sum.

    Args:
        optimizer: The optimizer that brings this reducer along.
        quantizer: How the momentum travels.
        text: What ranks compare; see `describe`.
    """

    needs_processes = True

    def __init__(self, optimizer: FrozenOptimizer, quantizer: Quantizer, text: str):
        self._optimizer = weakref.ref(optimizer)
        self._quantizer, self._text = quantizer, text

    def describe(self) -> str:
        return self._text

    def build(self, variables: list[Any], make_state: MakeState) -> list[Any]:
        taken = [tf.as_dtype(variable.dtype).is_floating for variable in variables]
        return [
            make_state(variable, "momentum_rest", dtype="float32", of_replica=True) if is_taken else None
            for variable, is_taken in zip(variables, taken)
        ]

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        optimizer: Any = self._optimizer()
        taken = [i for i, v in enumerate(variables) if state[i] is not None and optimizer.momentum_of(v) is not None]
        others = [i for i in range(len(gradients)) if i not in taken]
        results = dict(zip(others, wire.sum([gradients[i] for i in others])))
        parts, of_parts, rests = ([given[i] for i in taken] for given in (gradients, variables, state))
        if not taken:
            return [results[i] for i in range(len(gradients))]

        def exact() -> list[Any]:
            return tf.nest.flatten(wire.sum(parts), expand_composites=True)

        def quantized() -> list[Any]:
            sums, new_rests = self._sum_momentum(optimizer, parts, of_parts, rests, wire)
            for rest, new in zip(rests, new_rests):
                rest.assign(new)
            return tf.nest.flatten([_as(part, one) for part, one in zip(parts, sums)], expand_composites=True)

        flat = tf.cond(optimizer.is_exact(), exact, quantized)
        sums = tf.nest.pack_sequence_as(parts, tf.nest.flatten(flat), expand_composites=True)
        results.update(zip(taken, sums))
        return [results[i] for i in range(len(gradients))]

    def _sum_momentum(
        self, optimizer: FrozenOptimizer, parts: list[Any], variables: list[Any], rests: list[Any], wire: Wire
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the gradients that give the summed momentum, and what was not sent."""
        beta, share = optimizer.beta_1, tf.cast(wire.share, tf.float32)
        momenta = [optimizer.momentum_of(variable) for variable in variables]
        units = flatten([optimizer.unit_of(variable) for variable in variables])
        before = flatten(momenta)
        own = flatten([_dense(part, like) for part, like in zip(parts, momenta)])
        wanted = (share * beta * before + (1.0 - beta) * own) / units
        # A part of a batch has noisier gradients than the whole, by the root of its share.
        wanted = limited(wanted, optimizer.reach() * tf.sqrt(share))
        summed, rest = sum_quantized(wanted + flatten(rests), self._quantizer, wire)
        gradients = (summed * units - beta * before) / (1.0 - beta)
        return unflatten(gradients, momenta), unflatten(rest, rests)


def limited(values: Any, limit: Any) -> tf.Tensor:
    """Returns numbers between a limit below zero and above; those that are not finite as they are.

    Args:
        values: A tensor.
        limit: A tensor of the same shape, or a scalar.
    """
    values = tf.convert_to_tensor(values)
    is_beyond = (tf.abs(values) > limit) & tf.math.is_finite(values)
    return tf.where(is_beyond, tf.sign(values) * limit, values)


def _dense(part: Any, like: Any) -> tf.Tensor:
    """Returns a gradient as a dense tensor of a static shape."""
    return tf.reshape(tf.convert_to_tensor(part), like.shape)


def _as(part: Any, gradient: tf.Tensor) -> Any:
    """Returns a dense gradient in the form of another one, as branches must return it: IndexedSlices of all rows."""
    gradient = tf.cast(gradient, part.dtype)
    if not isinstance(part, tf.IndexedSlices):
        return gradient
    rows = tf.range(tf.cast(gradient.shape[0], part.indices.dtype))
    return tf.IndexedSlices(gradient, rows, part.dense_shape)
