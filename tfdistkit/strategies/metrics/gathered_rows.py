"""Gathers the rows of all replicas, in the order of one process, with two collectives for any number of tensors.

Every value is sent as its bits in int32: each replica fills its slice of a vector of zeros, and the sum over the
replicas is exact for every dtype, so all replicas hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistkit.collectives.carriers import carriers_for
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.strategies.sync import collective_keys
from tfdistkit.strategies.sync import step as steps

# Dtypes without 32 or 64 bits, and the dtype that carries each without loss.
_CARRIED_AS = {**carriers_for(lambda dtype: dtype.size < 4), tf.float16: tf.float32}


def has_rows(step: steps.ReplicaStep, tensor: tf.Tensor) -> bool:
    """Returns whether the first dimension of a tensor holds rows of the batch, or tokens, pixels, ... of its rows.

    A static dimension in a batch with an unknown number of rows is something else, such as classes.
    """
    if tensor.shape.rank is None or tensor.shape.rank == 0:
        return tensor.shape.rank is None
    first = tensor.shape[0]
    if first is None or step.rows is None or step.static_rows == 0:
        return True
    if step.static_rows is None:
        # One row, or a placeholder row. Graphs of Keras's steps hide the number of rows: there it is no row.
        return first == 1 and (step.held_rows == 1 or not step.in_keras_step)
    return bool(first % step.static_rows == 0)


def gather_rows(step: steps.ReplicaStep, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenates the rows of all replicas, whose numbers may differ.

    Args:
        step: The step of this replica.
        tensors: Dense tensors of at least one dimension each; their first dimensions may differ.

    Returns:
        One tensor for each, the same on all replicas.
    """
    counts, before, totals = places_of(step, tensors)
    return gather_placed(step, tensors, counts, before, totals)


def places_of(step: steps.ReplicaStep, tensors: Sequence[tf.Tensor]) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns where the rows of this replica are among the rows of all replicas.

    Args:
        step: The step of this replica.
        tensors: As in `gather_rows`.

    Returns:
        For each tensor its rows, the rows of the replicas before this one, and the rows of all replicas. A placeholder
        row does not count.
    """
    counts = [tf.shape(t)[0] for t in tensors]
    if step.rows is not None and not step.static_rows:
        counts = [tf.where(step.rows > 0, count, 0) for count in counts]
    own = tf.one_hot(step.replica_id, step.replicas, dtype=tf.int32)
    of_replicas = step.sum_of_all(own[:, None] * tf.stack(counts)[None])
    before = tf.reduce_sum(of_replicas[: step.replica_id], 0)
    return counts, tf.unstack(before), tf.unstack(tf.reduce_sum(of_replicas, 0))


def gather_values(step: steps.ReplicaStep, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Stacks the values of all replicas, including replicas without rows.

    Args:
        step: The step of this replica.
        tensors: Dense tensors, of the same shape on each replica.

    Returns:
        One tensor for each, with a new first dimension for the replicas.
    """
    ones, before, totals = ([n] * len(tensors) for n in (1, step.replica_id, step.replicas))
    return gather_placed(step, [t[None] for t in tensors], ones, before, totals)


def gather_placed(
    step: steps.ReplicaStep, tensors: Sequence[Any], counts: list[Any], before: list[Any], totals: list[Any]
) -> list[tf.Tensor]:
    """Concatenates the rows of all replicas, whose places (`places_of`) are known.

    Args:
        step: The step of this replica.
        tensors: As in `gather_rows`.
        counts: The rows of each tensor.
        before: For each tensor, the rows of the replicas before this one.
        totals: For each tensor, the rows of all replicas.

    Returns:
        One tensor for each, the same on all replicas.
    """
    if not tensors:
        return []
    placed = []
    for tensor, count, offset, total in zip(tensors, counts, before, totals):
        bits = _as_bits(tensor[:count])
        after = total - offset - count
        placed.append(tf.pad(bits, [[offset, after], *[[0, 0]] * (bits.shape.rank - 1)]))
    end = step.begin_sum(placed)
    flat = tf.concat([tf.reshape(p, [-1]) for p in placed], 0)
    packed = step.sum_of_all(flat) if flat.shape.is_fully_defined() else sum_of_any_size(step, flat)
    end(packed)
    parts = tf.split(packed, tf.stack([tf.size(p) for p in placed])) if len(placed) > 1 else [packed]
    results = []
    for tensor, part, bits, total in zip(tensors, parts, placed, totals):
        result = _from_bits(tf.reshape(part, tf.shape(bits)), tensor.dtype)
        known = total if isinstance(total, int) else tf.get_static_value(total)
        results.append(tf.ensure_shape(result, [None if known is None else int(known), *tensor.shape[1:]]))
    return results


def sum_of_any_size(step: steps.ReplicaStep, flat: tf.Tensor) -> tf.Tensor:
    """Sums vectors whose length is the same on all replicas, but may change between iterations of a loop.

    Args:
        step: The step of this replica.
        flat: The vector of this replica.
    """
    size = tf.size(flat)
    number, of_all = collective_keys.size_above(size)
    padded = tf.pad(flat, [[0, of_all - size]])
    with collective_keys.of_size(number):
        return step.sum_of_all(padded)[:size]


def _as_bits(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a tensor as int32, with a last dimension of two where its numbers have 64 bits."""
    if tensor.dtype in _CARRIED_AS:
        tensor = tf.cast(tensor, _CARRIED_AS[tensor.dtype])
    if tensor.dtype == tf.int32:
        return tensor
    if tensor.dtype.is_complex:
        part = tf.float32 if tensor.dtype == tf.complex64 else tf.float64
        return _as_bits(tf.stack([tf.cast(tf.math.real(tensor), part), tf.cast(tf.math.imag(tensor), part)], -1))
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise UnsupportedError(
            explain(
                "Inputs of a custom metric must be numbers or booleans, because the rows of all replicas are gathered.",
                received=f"a tensor of {tensor.dtype.name}",
                do="Turn strings into numbers before `update_state`, in the data pipeline or in the model.",
            )
        )
    return tf.bitcast(tensor, tf.int32)


def _from_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    carried = _CARRIED_AS.get(dtype, dtype)
    if dtype.is_complex:
        parts = _from_bits(bits, tf.float32 if dtype == tf.complex64 else tf.float64)
        return tf.complex(parts[..., 0], parts[..., 1])
    if carried != tf.int32:
        bits = tf.bitcast(bits, carried)
    return tf.cast(bits, dtype)
