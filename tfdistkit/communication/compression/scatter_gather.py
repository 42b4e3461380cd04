"""Sums of quantized vectors: each replica receives one part of all, sums it, and sends the sum to all."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import tensorflow as tf

from tfdistkit.communication.reducer import Wire


class Quantizer(Protocol):
    """Turns blocks of numbers into bytes.

    Attributes:
        block: The numbers of a block, which share a scale.
    """

    block: int

    def pack(self, table: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of each row: float32 [rows, blocks, block] to uint8 [rows, bytes].

        `counts` has how many numbers of each block are the vector's, float32 [rows, blocks]; the others are zeros.
        Where a block holds a number that is not finite, it must not be finite after `unpack`.
        """

    def unpack(self, data: tf.Tensor, blocks: int) -> tf.Tensor:
        """Returns the numbers of each row: uint8 [rows, bytes] to float32 [rows, blocks, block]."""


def sum_quantized(flat: tf.Tensor, quantizer: Quantizer, wire: Wire) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums a vector over the replicas; it travels quantized, and is summed in float32.

    Args:
        flat: A float32 vector of a static length.
        quantizer: How it travels.
        wire: The collectives.

    Returns:
        The sum, the same bits on all replicas; and this replica's share of what quantizing changed: the sums of
        these shares over the replicas and of the first result are the sum of the vectors, up to rounding.
    """
    size: int = flat.shape[0]
    blocks = -(-size // (wire.replicas * quantizer.block))
    padded = wire.replicas * blocks * quantizer.block
    table = tf.reshape(tf.pad(flat, [[0, padded - size]]), [wire.replicas, blocks, quantizer.block])

    begins: np.ndarray = np.arange(wire.replicas * blocks).reshape(wire.replicas, blocks) * quantizer.block
    counts = tf.constant(np.clip(size - begins, 0, quantizer.block), tf.float32)

    # A replica sums its own numbers of its part as they are, because they do not travel: one error less to keep.
    is_own = tf.one_hot(wire.replica_id, wire.replicas, on_value=True, off_value=False)[:, None, None]
    sent = quantizer.pack(table, counts)
    received = tf.where(is_own, table, quantizer.unpack(wire.exchange(sent), blocks))
    own_counts = counts[wire.replica_id]
    # Zeros again behind the end of the vector: signs have no zero, and would count in the scale of the last block.
    part = tf.where(tf.sequence_mask(tf.cast(own_counts, tf.int32), quantizer.block), tf.reduce_sum(received, 0), 0.0)
    sent_part = quantizer.pack(part[None], own_counts[None])
    everyone = quantizer.unpack(wire.gather(sent_part[0]), blocks)

    rest = tf.where(is_own, part - quantizer.unpack(sent_part, blocks)[0], table - quantizer.unpack(sent, blocks))
    return tf.reshape(everyone, [-1])[:size], tf.reshape(rest, [-1])[:size]


def bytes_of(tensor: tf.Tensor, rows: int) -> tf.Tensor:
    """Returns the bytes of each row of a float32 tensor."""
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [rows, -1])


def floats_of(data: tf.Tensor, shape: list[int]) -> tf.Tensor:
    """Returns the float32 tensor of a shape that `bytes_of` made bytes of."""
    return tf.bitcast(tf.reshape(data, [*shape, 4]), tf.float32)


def nan_if_not_finite(scale: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """Returns the scale of each block; NaN for one that holds a number that is not finite."""
    return tf.where(tf.reduce_all(tf.math.is_finite(table), 2), scale, tf.fill(tf.shape(scale), float("nan")))
