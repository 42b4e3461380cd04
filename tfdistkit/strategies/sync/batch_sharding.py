"""Splits every global batch: each worker takes its own part.

TensorFlow's distributed iterator asks all workers before every step whether one of them still has data, and does not
return the number of rows of the other workers. A worker that takes its part from the global batch knows both: every
rank has a part of every batch (perhaps an empty one), and the number of rows of the whole batch is known. That saves
two collectives in each step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdistkit.data.dataset_metadata import marks_of
from tfdistkit.data.rows import Split, rows_of
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.keras_adapter.dataset_tuning import without_idle_tuning


class BatchPart(NamedTuple):
    """One replica's part of a global batch.

    Args:
        data: The part, in the structure of the batch.
        rows: Rows of this part, a scalar float32 tensor.
        total_rows: Rows of the global batch, a scalar float32 tensor.
        sample: The sample of the whole batch; see `split`.
        total_in_shape: An empty tensor of shape (0, rows of the global batch), which are static where those of the
            global batch are.
        same_in_shape: An empty tensor of shape (0, i, j, ...), if the tensors i, j, ... of the data are marked as the
            same for all rows.
    """

    data: Any
    rows: Any
    total_rows: Any
    sample: Any = ()
    total_in_shape: Any = ()
    same_in_shape: Any = ()

    @property
    def same_for_all_rows(self) -> list[int]:
        """The places of the tensors in the flat data that are the same for all rows, such as a seed."""
        return list(getattr(self.same_in_shape, "shape", [0])[1:])

    @property
    def has_unknown_total(self) -> bool:
        """Whether a step is traced for any number of rows of the global batch.

        Of 6 rows, then 5, the first of two replicas has 3 each time: a tf.function keeps them static on this replica
        alone, and what depends on static rows (Keras's weights in the logs) would differ between replicas.
        """
        return hasattr(self.total_in_shape, "shape") and self.static_total is None

    @property
    def static_total(self) -> int | None:
        """The rows of the global batch if they are known while tracing, else None."""
        shape = getattr(self.total_in_shape, "shape", None)
        return None if shape is None else shape[1]


class KerasPart(BatchPart):
    """A part for a Keras step. An empty part holds a placeholder row, because layers fail without rows."""


# Dtypes that DeepCopy copies, and NumPy arrays hold. Strings are never written in place.
_COPIED = (
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128, tf.bool),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64),
)


def can_split(dataset: Any) -> bool:
    """Returns whether a dataset has a first dimension to split, and the user did not choose how to shard it.

    Raises:
        OptionError: if the tensors have different static numbers of rows.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return False
    policy = tf.data.experimental.AutoShardPolicy
    if dataset.options().experimental_distribute.auto_shard_policy not in (policy.AUTO, policy.DATA):
        return False
    return Split(dataset.element_spec, marks_of(dataset)).is_possible


def split_every_batch(dataset: Any) -> Any:
    """Turns auto-sharding from AUTO to DATA, so that the replicas share every global batch of one process.

    AUTO shards by file where it can: each worker then makes its batches from other files, and a step no
    longer sees the rows that one process would see. A policy that the user chose stays.
    """
    policy = tf.data.experimental.AutoShardPolicy
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    if dataset.options().experimental_distribute.auto_shard_policy != policy.AUTO:
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy.DATA
    return dataset.with_options(options)


@contextlib.contextmanager
def telling_what_has_no_files() -> Iterator[None]:
    """Explains TensorFlow's error for data that it shall shard by file, and that comes from no files.

    Raises:
        UnsupportedError: in its place.
    """
    try:
        yield
    except tf.errors.NotFoundError as error:
        if "unshardable source" not in str(error):
            raise
        raise UnsupportedError(
            explain(
                "A dataset with `AutoShardPolicy.FILE` must read files that TensorFlow can divide among the workers.",
                received="a dataset that reads arrays, a range or a Python function",
                do="Remove the policy: all ranks read the same batches, and each trains on its part of each of them.",
            )
        ) from error


def split(
    dataset: tf.data.Dataset,
    replicas: int,
    replica_ids: Sequence[int],
    kind: type[BatchPart] = BatchPart,
    sample: Callable[[Any], Any] | None = None,
) -> tf.data.Dataset:
    """Keeps the parts of some replicas of every batch (`rows_of`).

    Args:
        dataset: A dataset of global batches, the same on every replica.
        replicas: The number of parts.
        replica_ids: The parts to keep, consecutive numbers.
        kind: The class of the elements.
        sample: Called with each whole batch, if this process has one replica; its result is the `sample` of the part.

    Returns:
        A dataset of as many elements for each batch as there are `replica_ids`.
    """
    in_tuple = isinstance(dataset.element_spec, tuple)
    how = Split(dataset.element_spec, marks_of(dataset))

    def own_parts(batch: Any) -> list[BatchPart]:
        return _parts(how, batch, replicas, replica_ids, kind)

    # AutoGraph would convert these functions, and those that they call, anew for each `fit`.
    @tf.autograph.experimental.do_not_convert
    def part(*elements: Any) -> BatchPart:
        batch = elements if in_tuple else elements[0]
        return own_parts(batch)[0]._replace(sample=() if sample is None else sample(batch))

    @tf.autograph.experimental.do_not_convert
    def parts(*elements: Any) -> tf.data.Dataset:
        # One function for all parts: a function for each, mapped over their numbers, costs 0.3 ms a batch more.
        datasets = map(tf.data.Dataset.from_tensors, own_parts(elements if in_tuple else elements[0]))
        return functools.reduce(tf.data.Dataset.concatenate, datasets)

    dataset = without_idle_tuning(dataset)
    if len(replica_ids) > 1:
        return dataset.flat_map(parts).prefetch(len(replica_ids))
    return dataset.map(part).prefetch(1)


def part_of(batch: Any, replicas: int, replica_id: int) -> KerasPart:
    """Returns one replica's part of a batch that does not come from a dataset.

    Args:
        batch: Arrays, tensors (also ragged and sparse ones), numbers and None, in any structure.
        replicas: The number of parts.
        replica_id: The part to return.

    Raises:
        OptionError: if the tensors have different numbers of rows.
    """
    batch = tf.nest.map_structure(lambda v: v if v is None else _as_tensor(v), batch)
    how = Split(batch)
    if how.is_possible:
        return _parts(how, batch, replicas, [replica_id], KerasPart)[0]
    share = tf.constant(1.0)
    return KerasPart(batch, share, share * replicas)


def _parts(how: Split, batch: Any, replicas: int, ids: Sequence[Any], kind: type[BatchPart]) -> list[Any]:
    total = how.rows(batch)
    total_in_shape, total_rows = tf.zeros([0, total], tf.bool), tf.cast(total, tf.float32)
    same = tf.zeros([0, *how.same_for_all_rows], tf.bool) if how.same_for_all_rows else ()

    def part(start: Any, end: Any, rows: Any) -> BatchPart:
        own = tf.range(start, end)
        data = how.cut(batch, lambda value: _rows(value, start, end, own))
        return kind(data, tf.cast(rows, tf.float32), total_rows, total_in_shape=total_in_shape, same_in_shape=same)

    return [part(*bounds) for bounds in _bounds(total, replicas, ids, kind is KerasPart)]


def _bounds(total: Any, replicas: int, ids: Sequence[Any], fills_empty: bool) -> list[tuple[Any, Any, Any]]:
    """Returns the first row of each part, the row after its last, and its rows; ints if all are known.

    An empty part gets a placeholder row with `fills_empty`: the last row of the batch.
    """
    if isinstance(total, int) and isinstance(ids[0], int):
        found = [rows_of(total, replicas, i) for i in ids]
        starts = [max(min(first, total - 1), 0) if fills_empty else first for first, _ in found]
        return [(start, start + max(count, int(fills_empty)), count) for start, (_, count) in zip(starts, found)]
    # All parts in one vector: fewer nodes, which run for every batch.
    starts, counts = rows_of(total, replicas, tf.stack(list(ids)))
    taken = counts
    if fills_empty:
        starts, taken = tf.maximum(tf.minimum(starts, total - 1), 0), tf.maximum(counts, 1)
    return list(zip(*(tf.unstack(values, num=len(ids)) for values in (starts, starts + taken, counts))))


def has_ragged(batch: Any) -> bool:
    """Returns whether a batch, or its element spec, has ragged tensors."""
    return any(isinstance(one, (tf.RaggedTensor, tf.RaggedTensorSpec)) for one in tf.nest.flatten(batch))


def unwrap(args: tuple) -> tuple[tuple, BatchPart | None]:
    """Unwraps the data in the arguments of `strategy.run`.

    Returns:
        The arguments for the user's function, and the `BatchPart` that they came in, or None.
    """
    if len(args) == 1 and isinstance(args[0], BatchPart):
        return (args[0].data,), args[0]
    if len(args) == 1 and isinstance(args[0], tuple) and len(args[0]) == 1 and isinstance(args[0][0], BatchPart):
        return ((args[0][0].data,),), args[0][0]  # From `predict_on_batch`.
    return args, None


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)) else tf.convert_to_tensor(value)


def _rows(value: Any, first: Any, end: Any, numbers: tf.Tensor) -> Any:
    """Returns some rows of a tensor, dense ones in their own memory.

    Args:
        value: The tensor.
        first: The number of the first row.
        end: The number of the row after the last.
        numbers: The numbers of all rows: `tf.range(first, end)`.
    """
    if isinstance(value, tf.SparseTensor):
        width = tf.cast(value.dense_shape[1:], tf.int64)
        start = tf.concat([[tf.cast(first, tf.int64)], tf.zeros_like(width)], 0)
        return tf.sparse.slice(value, start, tf.concat([[tf.cast(end - first, tf.int64)], width], 0))
    if isinstance(value, tf.Tensor) and value.dtype in _COPIED:
        return tf.gather(value, numbers)  # One node, which copies.
    return value[first:end]


def keep_arrays_safe(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Copies each batch of a dataset, so that splitting it cannot overwrite the user's NumPy arrays.

    Batches of a generator or a PyDataset share memory with the user's arrays. TensorFlow does not write to such a
    batch, but may write to a slice of it: an operation that works in place (`y_pred - y`) then sometimes overwrites
    rows of the user's data.

    Args:
        dataset: A dataset of batches.

    Returns:
        The same batches, each in its own memory.
    """
    in_tuple = isinstance(dataset.element_spec, tuple)

    @tf.autograph.experimental.do_not_convert
    def copied(*elements: Any) -> Any:
        batch = elements if in_tuple else elements[0]
        return tf.nest.map_structure(lambda v: _in_own_memory(v) if tf.is_tensor(v) else v, batch)

    return dataset.map(copied)


def _in_own_memory(value: Any) -> Any:
    """Copies a dense tensor, which `tf.identity` does not do."""
    if not isinstance(value, tf.Tensor) or value.dtype not in _COPIED:
        return value
    copy = tf.raw_ops.DeepCopy(x=value)
    copy.set_shape(value.shape)
    return copy


def require_no_state_of_rows(model: Any) -> None:
    """Checks that no layer keeps a state for each row of a batch: a replica has other rows in each step.

    Args:
        model: The model, on several replicas.

    Raises:
        UnsupportedError: if a recurrent layer is stateful.
    """
    for layer in private_api.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise UnsupportedError(
                explain(
                    "Recurrent layers on several replicas must not be stateful: they keep a state for each row of a "
                    "batch, and each replica has only some of the rows.",
                    received=f"stateful=True of the layer {layer.name!r}",
                    expected="stateful=False, or one replica",
                    do="Make the layer with `stateful=False`, or train in one process.",
                )
            )
