"""Gradient all-reduce over Horovod with compression, Adasum, scaling or dense IndexedSlices."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.collectives import horovod_transport as transport
from tfdistkit.collectives.horovod_transport import hvd


def densify(gradients: list[Any]) -> list[Any]:
    """Converts IndexedSlices to dense tensors: cheaper for small tables, of which most rows have a gradient."""
    return [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def sum_as_float16(gradients: list[Any], process_set: Any) -> list[Any]:
    """Sums gradients sent as float16: half the bytes, 11 bits of precision; values above 65,504 overflow."""
    small = [_cast(g, tf.float16) for g in gradients]
    summed = transport.all_reduce(small, tf.distribute.ReduceOp.SUM, process_set)
    return [_cast(s, g.dtype) for s, g in zip(summed, gradients)]


def sum_as_bfloat16(gradients: list[Any], process_set: Any) -> list[Any]:
    """Sums gradients sent as bfloat16: half the bytes, 8 bits of precision, the range of float32.

    Horovod has no bfloat16, so the bits are sent as uint16: each rank receives one part of all ranks' gradients, sums
    it in float32, and sends the sum to all. That moves as many bytes as a ring all-reduce.
    """
    dense = [i for i, g in enumerate(gradients) if not isinstance(g, tf.IndexedSlices)]
    sparse = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    results = list(gradients)
    # The rows of IndexedSlices are gathered, not summed, so they keep their dtype.
    rows = transport.all_reduce([gradients[i] for i in sparse], tf.distribute.ReduceOp.SUM, process_set)
    for i, gradient in zip(sparse, rows):
        results[i] = gradient
    if dense:
        shapes = [tf.shape(gradients[i]) for i in dense]
        sizes = [tf.size(gradients[i]) for i in dense]
        flat = tf.concat([tf.reshape(tf.cast(gradients[i], tf.float32), [-1]) for i in dense], 0)
        parts = tf.split(_sum_bits(flat, process_set), sizes)
        for i, part, shape in zip(dense, parts, shapes):
            results[i] = tf.cast(tf.reshape(part, shape), gradients[i].dtype)
    return results


def _sum_bits(flat: tf.Tensor, process_set: Any) -> tf.Tensor:
    ranks = process_set.size()
    padded = tf.pad(flat, [[0, -tf.size(flat) % ranks]])
    received = transport.all_to_all(tf.bitcast(tf.cast(padded, tf.bfloat16), tf.uint16), process_set)
    parts = tf.reshape(tf.cast(tf.bitcast(received, tf.bfloat16), tf.float32), [ranks, -1])
    summed = tf.cast(tf.reduce_sum(parts, 0), tf.bfloat16)
    gathered = transport.all_gather(tf.bitcast(summed, tf.uint16), 0, process_set)
    return tf.cast(tf.bitcast(gathered, tf.bfloat16), tf.float32)[: tf.size(flat)]


def adasum(gradients: list[Any], dtype: tf.DType | None = None) -> list[Any]:
    """Combines gradients by Adasum (https://arxiv.org/abs/2006.02924): parallel ones averaged, orthogonal ones summed.

    Args:
        gradients: Dense tensors.
        dtype: The dtype to send. Default: their own.
    """
    sent = [transport.opaque(g if dtype is None else _cast(g, dtype)) for g in gradients]
    combined = transport.awaited(
        [hvd.allreduce(g, op=hvd.Adasum, name=transport.next_name("adasum"), ignore_name_scope=True) for g in sent]
    )
    return [_cast(c, g.dtype) for c, g in zip(combined, gradients)]


def scale(gradients: list[Any], factor: float) -> list[Any]:
    """Multiplies gradients, dense or IndexedSlices, by a number."""
    return [
        tf.IndexedSlices(g.values * tf.cast(factor, g.dtype), g.indices, g.dense_shape)
        if isinstance(g, tf.IndexedSlices)
        else g * tf.cast(factor, g.dtype)
        for g in gradients
    ]


def _cast(gradient: Any, dtype: tf.DType) -> Any:
    if not gradient.dtype.is_floating:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)
