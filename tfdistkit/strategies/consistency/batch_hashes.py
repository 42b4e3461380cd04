"""Hashes a sample of a batch, so that ranks can compare whether they read the same data.

A few values of each tensor of a batch are sampled before it is split, and returned beside the rank's part. Those of the
first batch of an epoch are compared. The others are taken nevertheless: that costs less than to ask which one it is.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

# Sampled values of each tensor of a batch, and of each array.
OF_BATCH, _OF_ARRAY = 256, 4096
# Numbers of a mark for each tensor: its hash, and whether the tensor distinguishes rows.
WIDTH = 2
_OPAQUE = (tf.variant, tf.resource)


def samples(batch: Any) -> tuple[tf.Tensor, ...]:
    """Samples values of each tensor of a batch, also of ragged and sparse tensors.

    Args:
        batch: The batch, in a graph.

    Returns:
        A vector for each tensor.
    """
    values = [v for v in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(v)]
    return tuple(_sampled(value, OF_BATCH) for value in values)


def mark_of_samples(taken: tuple[tf.Tensor, ...]) -> list[int]:
    """Returns the mark of a batch: `WIDTH` numbers for each tensor.

    Args:
        taken: The result of `samples`.
    """
    return [number for value in taken for number in _mark(np.asarray(value))]


def mark_of_array(array: tf.Tensor) -> int:
    """Returns a hash of evenly spaced values of an array.

    Args:
        array: The array.
    """
    if array.dtype == tf.string:
        with tf.device("CPU:0"):
            return _mark(np.asarray(_sampled(array, _OF_ARRAY)))[0]  # As an array of NumPy all strings are copied.
    return _mark(sampled_values(array, _OF_ARRAY))[0]


def marks_of_whole(values: Any) -> list[list[Any]]:
    """Returns the dtype, the shape and the mark of each tensor or array of a batch outside of a graph.

    Args:
        values: Tensors, also ragged and sparse ones, arrays, or what NumPy makes arrays of, in any structure.
    """
    tensors, samples = _tensors_of(values), samples_of_whole(values, _OF_ARRAY)
    return [[t.dtype.name, list(t.shape), *_mark(sample)] for t, sample in zip(tensors, samples)]


def samples_of_whole(values: Any, count: int) -> list[np.ndarray]:
    """Returns evenly spaced values of each tensor or array of a batch outside of a graph.

    Args:
        values: See `marks_of_whole`.
        count: See `sampled_values`.
    """
    return [sampled_values(value, count) for value in _tensors_of(values)]


def _tensors_of(values: Any) -> list[Any]:
    found = tf.nest.flatten(values, expand_composites=True)
    return [value if tf.is_tensor(value) else np.asarray(value) for value in found]


def sampled_values(value: Any, count: int) -> np.ndarray:
    """Returns evenly spaced values of a tensor or an array, less than twice as many as asked for if it has more.

    Args:
        value: A tensor outside of a graph, or an array; where it is in memory, it is not copied.
        count: How many.
    """
    if tf.is_tensor(value) and (value.dtype in _OPAQUE or "CPU" not in value.device):
        return np.asarray(_sampled(value, count))
    flat = np.asarray(value).reshape(-1)
    return flat[:: max(flat.size // count, 1)]


def mark_of_values(values: np.ndarray) -> int:
    """Returns a hash of all values.

    Args:
        values: The values.
    """
    return _mark(values.reshape(-1))[0]


def _sampled(value: tf.Tensor, count: int) -> tf.Tensor:
    if value.dtype in _OPAQUE:
        return tf.zeros([0])
    flat = tf.reshape(value, [-1])
    size = flat.shape[0] if flat.shape[0] is not None else tf.size(flat)
    step = max(size // count, 1) if isinstance(size, int) else tf.maximum(size // count, 1)
    return tf.strided_slice(flat, [0], [tf.int32.max], [step])


def _mark(sample: np.ndarray) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{sample.dtype.kind} {sample.shape}".encode(), digest_size=8)
    digest.update(repr(sample.tolist()).encode() if sample.dtype.hasobject else np.ascontiguousarray(sample).tobytes())
    distinguishes_rows = sample.size > 1 and bool((sample != sample[0]).any())
    return int.from_bytes(digest.digest(), "little", signed=True) >> 1, int(distinguishes_rows)
