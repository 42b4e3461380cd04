"""`ByteGrad`: 8 bits for each number."""

from __future__ import annotations

import tensorflow as tf

from tfdistkit.communication.compression.compression import Compression, flatten, unflatten
from tfdistkit.communication.compression.scatter_gather import bytes_of, floats_of, nan_if_not_finite, sum_quantized
from tfdistkit.communication.reducer import Wire
from tfdistkit.validation import require_integer


class ByteGrad(Compression):
    """Sends gradients as bytes: a quarter of the bytes, steps of 1/255 of the range of each block.

    As in Bagua (https://tutorials.baguasys.com/algorithms/bytegrad): the minimum and maximum of a block and one byte
    for each number; a replica sums its part in float32 and sends the sum as bytes, too.

    Args:
        block: How many numbers share a minimum and a maximum.
        min_size: Tensors of fewer numbers are not compressed.

    Raises:
        OptionError: (a ValueError) if an argument is out of range.
    """

    def __init__(self, block: int = 512, min_size: int = 0):
        super().__init__(min_size)
        self.block = require_integer("block", block, at_least=8)

    def sum_compressed(self, gradients: list[tf.Tensor], state: list[None], wire: Wire) -> list[tf.Tensor]:
        return unflatten(sum_quantized(flatten(gradients), self, wire)[0], gradients)

    def pack(self, table: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of each row; see `Quantizer`."""
        rows = table.shape[0]
        low, high = tf.reduce_min(table, 2), tf.reduce_max(table, 2)
        step = (high - low) / 255.0
        levels = tf.round(tf.math.divide_no_nan(table - low[:, :, None], step[:, :, None]))
        levels = tf.clip_by_value(tf.where(tf.math.is_finite(levels), levels, tf.zeros_like(levels)), 0.0, 255.0)
        scales = tf.stack([nan_if_not_finite(low, table), step], 2)
        return tf.concat([tf.reshape(tf.cast(levels, tf.uint8), [rows, -1]), bytes_of(scales, rows)], 1)

    def unpack(self, data: tf.Tensor, blocks: int) -> tf.Tensor:
        """Returns the numbers of each row; see `Quantizer`."""
        rows, numbers = data.shape[0], blocks * self.block
        levels = tf.cast(tf.reshape(data[:, :numbers], [rows, blocks, self.block]), tf.float32)
        scales = floats_of(data[:, numbers:], [rows, blocks, 2])
        return levels * scales[:, :, 1, None] + scales[:, :, 0, None]
