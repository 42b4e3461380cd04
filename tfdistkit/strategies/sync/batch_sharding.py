"""Each worker's part of every global batch, cut out by the worker itself.

TensorFlow's distributed iterator asks all workers before every step whether one of them still has data, and
does not say how many rows the others got. A worker that cuts its part out of the global batch knows both:
every rank has a part of every batch (an empty one, if need be), and the rows of the whole are at hand. That
saves two of the collectives of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdistkit.data.dataset_metadata import marks_of
from tfdistkit.data.rows import Split, rows_of
from tfdistkit.keras_adapter.dataset_tuning import without_idle_tuning


class BatchPart(NamedTuple):
    """One replica's part of a global batch.

    Args:
        data: The part, in the structure of the batch.
        rows: Rows of this part, a scalar float32 tensor.
        total_rows: Rows of the global batch, a scalar float32 tensor.
        sample: What was asked for of the whole batch; see `split`.
    """

    data: Any
    rows: Any
    total_rows: Any
    sample: Any = ()


class KerasPart(BatchPart):
    """A part for a Keras step. One without rows has a row of the batch that stands in: nothing computes on no rows."""


# What DeepCopy copies, and NumPy arrays hold. Strings are never written in place.
_COPIED = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
)


def can_split(dataset: Any) -> bool:
    """Whether the elements of a dataset have a first dimension to split, and the user left how to shard it open.

    Raises:
        OptionError: if tensors are known to have different numbers of rows.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return False
    policy = tf.data.experimental.AutoShardPolicy
    if dataset.options().experimental_distribute.auto_shard_policy not in (policy.AUTO, policy.DATA):
        return False
    return Split(dataset.element_spec, marks_of(dataset)).is_possible


def split(
    dataset: tf.data.Dataset,
    replicas: int,
    replica_ids: Sequence[int],
    kind: type[BatchPart] = BatchPart,
    sample: Callable[[Any, tf.Tensor], Any] | None = None,
) -> tf.data.Dataset:
    """Keeps the parts of some replicas of every batch (`rows_of`).

    Args:
        dataset: A dataset of global batches, the same on every replica.
        replicas: How many parts there are.
        replica_ids: Which of them to keep, consecutive numbers.
        kind: What the elements are to be.
        sample: Called with each whole batch and its number, where there is one replica here; what it returns is the
            `sample` of the part.

    Returns:
        A dataset of as many elements for each batch as there are `replica_ids`.
    """
    in_tuple = isinstance(dataset.element_spec, tuple)
    how = Split(dataset.element_spec, marks_of(dataset))

    def part(*elements: Any) -> BatchPart:
        return _part(how, elements if in_tuple else elements[0], replicas, replica_ids[0], kind)

    def sampled_part(number: tf.Tensor, batch: Any) -> BatchPart:
        assert sample is not None
        own: BatchPart = _part(how, batch, replicas, replica_ids[0], kind)
        return own._replace(sample=sample(batch, number))

    def parts(*elements: Any) -> tf.data.Dataset:
        batch = elements if in_tuple else elements[0]
        numbers = tf.data.Dataset.range(len(replica_ids), output_type=tf.int32)
        return numbers.map(lambda i: _part(how, batch, replicas, replica_ids[0] + i, kind))

    dataset = without_idle_tuning(dataset)
    if len(replica_ids) > 1:
        return dataset.flat_map(parts).prefetch(len(replica_ids))
    return (dataset.map(part) if sample is None else dataset.enumerate().map(sampled_part)).prefetch(1)


def part_of(batch: Any, replicas: int, replica_id: int) -> KerasPart:
    """Returns one replica's part of a batch that is no element of a dataset.

    Args:
        batch: Arrays, tensors (ragged and sparse ones included), numbers and None, in any structure.
        replicas: How many parts there are.
        replica_id: Which of them.

    Raises:
        OptionError: if the tensors have different numbers of rows.
    """
    batch = tf.nest.map_structure(lambda v: v if v is None else _as_tensor(v), batch)
    how = Split(batch)
    if how.is_possible:
        return _part(how, batch, replicas, replica_id, KerasPart)
    share = tf.constant(1.0)
    return KerasPart(batch, share, share * replicas)


def _part(how: Split, batch: Any, replicas: int, replica_id: Any, kind: type[BatchPart]) -> Any:
    total = how.rows(batch)
    first, count = rows_of(total, replicas, replica_id)
    taken, start = count, first
    if kind is KerasPart:
        # The last row stands in for none.
        both_known = isinstance(count, int)
        taken = max(count, 1) if both_known else tf.maximum(count, 1)
        start = max(min(first, total - 1), 0) if both_known else tf.maximum(tf.minimum(first, total - 1), 0)
    data = how.cut(batch, lambda value: _rows(value, start, start + taken))
    return kind(data, tf.cast(count, tf.float32), tf.cast(total, tf.float32))


def unwrap(args: tuple) -> tuple[tuple, BatchPart | None]:
    """Takes the data out of the arguments of `strategy.run`.

    Returns:
        The arguments as the user's function wants them, and the part that they were, if they were one.
    """
    if len(args) == 1 and isinstance(args[0], BatchPart):
        return (args[0].data,), args[0]
    if len(args) == 1 and isinstance(args[0], tuple) and len(args[0]) == 1 and isinstance(args[0][0], BatchPart):
        return ((args[0][0].data,),), args[0][0]  # of `predict_on_batch`
    return args, None


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(value)


def _rows(value: Any, first: Any, end: Any) -> Any:
    if isinstance(value, tf.SparseTensor):
        width = tf.cast(value.dense_shape[1:], tf.int64)
        start = tf.concat([[tf.cast(first, tf.int64)], tf.zeros_like(width)], 0)
        return tf.sparse.slice(value, start, tf.concat([[tf.cast(end - first, tf.int64)], width], 0))
    return value[first:end] if isinstance(value, tf.RaggedTensor) else _in_own_memory(value[first:end])


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
