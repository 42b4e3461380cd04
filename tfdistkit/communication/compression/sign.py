"""`Sign`: one bit for each number."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.compression.compression import flatten, unflatten
from tfdistkit.communication.compression.scatter_gather import bytes_of, floats_of, nan_if_not_finite, sum_quantized
from tfdistkit.communication.compression.stateful import Feedback
from tfdistkit.communication.reducer import Wire
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.validation import require_integer

_BITS = 8


class Sign(Feedback):
    """Sends the signs of gradients, and the mean size of each block: a thirtieth of the bytes, with error feedback.

    The signs alone converge badly from the first step on, so the first steps are exact. A momentum of SGD adds up what
    the signs are off by, and training diverges (measured: an accuracy of 0.56 in place of 0.98), so it is refused.

    Args:
        warmup_steps: How many steps are exact; at least 1.
        block: How many numbers share a size; a multiple of 8.
        min_size: Tensors of fewer numbers are not compressed.

    Raises:
        OptionError: (a ValueError) if an argument is out of range.
        UnsupportedError: (a RuntimeError) when the optimizer is built: if it has a `momentum`.
    """

    def __init__(self, warmup_steps: int, block: int = 1024, min_size: int = 0):
        super().__init__(min_size)
        self.warmup_steps = require_integer("warmup_steps", warmup_steps)
        self.block = require_integer("block", block, at_least=_BITS)
        if block % _BITS:
            raise OptionError(explain(f"`block` must be a multiple of {_BITS}.", received=f"block={block}"))

    def check_optimizer(self, optimizer: Any) -> None:
        if getattr(optimizer, "momentum", 0.0):
            raise UnsupportedError(
                explain(
                    "Sign needs an optimizer without `momentum`: training diverges with both.",
                    received=f"{type(optimizer).__name__} with momentum={optimizer.momentum!r}",
                    do="Use keras.optimizers.Adam(...), SGD(...) without momentum, or ByteGrad() or TopK(...).",
                )
            )

    def sum_with_rests(
        self, gradients: list[tf.Tensor], state: list[Any], step: tf.Tensor, wire: Wire
    ) -> tuple[list[tf.Tensor], list[tuple[Any, tf.Tensor]]]:
        rests = [one["rest"] for one in state]
        flat, kept = flatten(gradients), flatten(rests)

        def exact() -> tuple[tf.Tensor, tf.Tensor]:
            return wire.sum([flat])[0], tf.identity(kept)

        def signs() -> tuple[tf.Tensor, tf.Tensor]:
            return sum_quantized(flat + kept, self, wire)

        summed, rest = tf.cond(step < self.warmup_steps, exact, signs)
        return unflatten(summed, gradients), list(zip(rests, unflatten(rest, rests)))

    def pack(self, table: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of each row; see `Quantizer`."""
        rows = table.shape[0]
        weights = tf.constant([1 << bit for bit in reversed(range(_BITS))], tf.int32)
        bits = tf.cast(tf.reshape(table > 0, [rows, -1, _BITS]), tf.int32)
        packed = tf.cast(tf.reduce_sum(bits * weights, 2), tf.uint8)
        sizes = tf.math.divide_no_nan(tf.reduce_sum(tf.abs(table), 2), counts)
        return tf.concat([packed, bytes_of(nan_if_not_finite(sizes, table), rows)], 1)

    def unpack(self, data: tf.Tensor, blocks: int) -> tf.Tensor:
        """Returns the numbers of each row; see `Quantizer`."""
        rows, length = data.shape[0], blocks * self.block // _BITS
        shifts = tf.constant(list(reversed(range(_BITS))), tf.uint8)
        bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(data[:, :length, None], shifts), tf.constant(1, tf.uint8))
        signs = tf.reshape(tf.cast(bits, tf.float32) * 2.0 - 1.0, [rows, blocks, self.block])
        return signs * floats_of(data[:, length:], [rows, blocks, 1])
