"""Dtypes that a transport cannot send, and the dtype that carries each without loss."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

# For all that TensorFlow's and Horovod's operations lack, each of them some of these. Strings have no carrier.
CARRIERS: dict[tf.DType, tf.DType] = {
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.bool, tf.int8, tf.int16, tf.uint8, tf.uint16), tf.int32),
    **dict.fromkeys((tf.uint32, tf.uint64), tf.int64),
}


def carriers_for(is_missing: Callable[[tf.DType], bool]) -> dict[tf.DType, tf.DType]:
    """Returns the carriers of the dtypes that a transport lacks.

    Args:
        is_missing: Returns whether the transport lacks a dtype.
    """
    return {dtype: carrier for dtype, carrier in CARRIERS.items() if is_missing(dtype)}
