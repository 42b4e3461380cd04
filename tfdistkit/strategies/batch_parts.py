"""Each worker's part of every global batch, cut out by the worker itself.

TensorFlow's distributed iterator asks all workers before every step whether one of them still has data, and
does not say how many rows the others got. A worker that cuts its part out of the global batch knows both:
every rank has a part of every batch (an empty one, if need be), and the rows of the whole are at hand. That
saves two of the collectives of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdistkit.strategies.step import count_rows


class BatchPart(NamedTuple):
    """One replica's part of a global batch.

    Args:
        data: The part, in the structure of the batch.
        total_rows: Rows of the global batch, a scalar float32 tensor.
        sample: What was asked for of the whole batch; see `split`.
    """

    data: Any
    total_rows: Any
    sample: Any = ()


# What DeepCopy copies, and NumPy arrays hold. Strings are never written in place.
_COPIED = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
)


def can_split(dataset: Any) -> bool:
    """Whether the elements of a dataset have a first dimension to split, and the user left how to shard it open."""
    if not isinstance(dataset, tf.data.Dataset):
        return False
    policy = tf.data.experimental.AutoShardPolicy
    if dataset.options().experimental_distribute.auto_shard_policy not in (policy.AUTO, policy.DATA):
        return False
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    return any(shape is not None and shape.rank != 0 for shape in shapes)


def split(
    dataset: tf.data.Dataset, replicas: int, replica_id: int, sample: Callable[[Any], Any] | None = None
) -> tf.data.Dataset:
    """Keeps one replica's part of every batch: consecutive rows, in the order of the replicas.

    Args:
        dataset: A dataset of global batches, the same on every replica.
        replicas: How many parts there are.
        replica_id: Which of them to keep, from 0.
        sample: Called with each whole batch; what it returns is the `sample` of the part.

    Returns:
        A dataset of as many `BatchPart`s; the last parts of a batch with fewer rows than replicas are empty.
    """
    in_tuple = isinstance(dataset.element_spec, tuple)

    def part(*elements: Any) -> BatchPart:
        batch = elements if in_tuple else elements[0]
        rows, static_rows = count_rows(batch)
        total = tf.cast(rows, tf.int32) if static_rows is None else static_rows
        most = -(-total // replicas)
        least = tf.minimum if static_rows is None else min
        first = least(total, replica_id * most)
        end = least(total, first + most)
        taken = () if sample is None else sample(batch)
        return BatchPart(tf.nest.map_structure(lambda value: _rows(value, first, end), batch), rows, taken)

    return dataset.map(part).prefetch(1)


def unwrap(args: tuple) -> tuple[tuple, tf.Tensor | None]:
    """Takes the data out of the arguments of `strategy.run`.

    Returns:
        The arguments as the user's function wants them, and the rows of the global batch if they are known.
    """
    if len(args) == 1 and isinstance(args[0], BatchPart):
        return (args[0].data,), args[0].total_rows
    return args, None


def _rows(value: Any, first: Any, end: Any) -> Any:
    if isinstance(value, tf.SparseTensor):
        width = tf.cast(value.dense_shape[1:], tf.int64)
        start = tf.concat([[tf.cast(first, tf.int64)], tf.zeros_like(width)], 0)
        return tf.sparse.slice(value, start, tf.concat([[tf.cast(end - first, tf.int64)], width], 0))
    if isinstance(value, tf.RaggedTensor):
        return value[first:end]
    if tf.is_tensor(value) and value.shape.rank != 0:
        return _in_own_memory(value[first:end])
    return value  # One value for the whole batch, or Keras's way to say None.


def keep_arrays_safe(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Makes a dataset that TensorFlow may split without a danger to the user's NumPy arrays.

    Batches of a generator or a PyDataset lie in the arrays themselves. TensorFlow knows that it must not
    write there, but not of a slice of such a batch: an operation that works in place (`y_pred - y`) then
    overwrites rows of the user's data, now and then.

    Args:
        dataset: A dataset of batches.

    Returns:
        The same, with each batch in memory of its own.
    """
    in_tuple = isinstance(dataset.element_spec, tuple)

    def copied(*elements: Any) -> Any:
        batch = elements if in_tuple else elements[0]
        return tf.nest.map_structure(lambda v: _in_own_memory(v) if tf.is_tensor(v) else v, batch)

    return dataset.map(copied)


def _in_own_memory(value: Any) -> Any:
    """Copies a dense tensor; `tf.identity` would not."""
    if not isinstance(value, tf.Tensor) or value.dtype not in _COPIED:
        return value
    copy = tf.raw_ops.DeepCopy(x=value)
    copy.set_shape(value.shape)
    return copy
