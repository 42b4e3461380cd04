"""Strings as bytes of one length, because transports send numbers only."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def to_bytes(strings: tf.Tensor, length: Any) -> tf.Tensor:
    """Returns strings as a uint8 tensor with one dimension more, of zeros behind their ends.

    Args:
        strings: A string tensor of shape `[...]`.
        length: The length of the longest in bytes, a scalar int32 tensor.
    """
    # TensorFlow reads no bytes of a length of zero.
    return tf.io.decode_raw(strings, tf.uint8, fixed_length=tf.maximum(length, 1))


def from_bytes(values: tf.Tensor, lengths: tf.Tensor) -> tf.Tensor:
    """Returns the strings of `to_bytes`.

    Args:
        values: The bytes, a uint8 tensor of shape `[..., length]`.
        lengths: How many of them belong to each string, an int32 tensor of shape `[...]`.
    """
    letters = tf.constant([bytes([i]) for i in range(256)])
    joined = tf.strings.reduce_join(tf.gather(letters, tf.cast(values, tf.int32)), axis=-1)
    return tf.strings.substr(joined, tf.zeros_like(lengths), lengths)
