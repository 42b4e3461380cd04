"""`Int8`: 8 bits for each number, right in the mean."""

from __future__ import annotations

import tensorflow as tf

from tfdistkit.communication.compression.compression import Compression, flatten, unflatten
from tfdistkit.communication.compression.scatter_gather import bytes_of, floats_of, nan_if_not_finite, sum_quantized
from tfdistkit.communication.reducer import Wire
from tfdistkit.validation import require_bool, require_integer


class Int8(Compression):
    """Sends gradients as int8: a quarter of the bytes, steps of 1/127 of the largest number of each block.

    Args:
        block: How many numbers share a scale.
        stochastic: Whether a number is rounded up as often as it is near to the next step, which is right in the mean
            over many gradients; if not, it is rounded to the nearest. What is drawn depends on the gradients alone,
            so that a run which is resumed draws the same; a gradient that never changes is always rounded alike.
        min_size: Tensors of fewer numbers are not compressed.

    Raises:
        OptionError: (a ValueError) if an argument is out of range.
    """

    def __init__(self, block: int = 512, stochastic: bool = True, min_size: int = 0):
        super().__init__(min_size)
        self.block = require_integer("block", block, at_least=8)
        self.stochastic = require_bool("stochastic", stochastic)

    def sum_compressed(self, gradients: list[tf.Tensor], state: list[None], wire: Wire) -> list[tf.Tensor]:
        return unflatten(sum_quantized(flatten(gradients), self, wire)[0], gradients)

    def pack(self, table: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of each row; see `Quantizer`."""
        rows = table.shape[0]
        scale = tf.reduce_max(tf.abs(table), 2) / 127.0
        exact = tf.math.divide_no_nan(table, scale[:, :, None])
        exact = tf.where(tf.math.is_finite(exact), exact, tf.zeros_like(exact))
        levels = tf.floor(exact + self._drawn(table)) if self.stochastic else tf.round(exact)
        whole = tf.cast(tf.clip_by_value(levels, -127.0, 127.0), tf.int8)
        sent_scale = nan_if_not_finite(scale, table)[:, :, None]
        return tf.concat([tf.reshape(tf.bitcast(whole, tf.uint8), [rows, -1]), bytes_of(sent_scale, rows)], 1)

    def _drawn(self, table: tf.Tensor) -> tf.Tensor:
        bits = tf.bitcast(table, tf.int32)
        places = tf.reshape(tf.range(1, tf.size(bits) + 1), tf.shape(bits))
        return tf.random.stateless_uniform(tf.shape(table), [tf.reduce_sum(bits), tf.reduce_sum(bits * places)])

    def unpack(self, data: tf.Tensor, blocks: int) -> tf.Tensor:
        """Returns the numbers of each row; see `Quantizer`."""
        rows, numbers = data.shape[0], blocks * self.block
        levels = tf.cast(tf.bitcast(tf.reshape(data[:, :numbers], [rows, blocks, self.block]), tf.int8), tf.float32)
        return levels * floats_of(data[:, numbers:], [rows, blocks, 1])
