"""Forgets how many rows a batch has while a step is traced, as versions of Keras up to 3.15 do.

From Keras 3.16 on, `fit` takes a batch out of the iterator before it calls the function of the step, which is traced
for this number of rows. `keras.ops.shape(x)[0]` would be the rows of one replica as a Python number, which no replica
can add up.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdistkit.supported import numbers_of

_TAKES_BATCHES = numbers_of(keras.__version__) >= (3, 16)


def with_rows_of(spec: Any, data: Any) -> Any:
    """Returns a batch whose tensors have a static number of rows only where the dataset promises one.

    Args:
        spec: The element spec of the dataset; None if it is not known.
        data: A batch, the values of one replica.
    """
    if spec is None or not _TAKES_BATCHES or tf.executing_eagerly():
        return data
    try:
        tf.nest.assert_same_structure(spec, data)
    except (TypeError, ValueError):
        return data
    return tf.nest.map_structure(_forgotten, spec, data)


def _forgotten(spec: Any, value: Any) -> Any:
    if not isinstance(spec, tf.TensorSpec) or not isinstance(value, tf.Tensor):
        return value
    if not spec.shape.rank or spec.shape[0] is not None or value.shape[0] is None:
        return value
    return tf.compat.v1.placeholder_with_default(value, [None, *value.shape[1:]])
