"""Takes each worker's rows of every global batch on the worker itself."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import PADDED, ROWS_OF_BATCHES, has_mark
from tfdistkit.data.padding import (
    require_weights_fit,
    require_weights_kept,
    require_weights_of_rows,
    with_weight,
    without_padding,
)
from tfdistkit.data.rows import rows_of
from tfdistkit.data.shard_spec import uneven
from tfdistkit.errors import OptionError, explain


def rows_of_batches(dataset: tf.data.Dataset, parts: int, index: int, even_steps: str | None) -> tf.data.Dataset:
    """Keeps one part of every batch: consecutive rows, in the order of the parts.

    Args:
        dataset: A dataset of global batches, the same on every worker.
        parts: The number of parts.
        index: The part to keep, from 0.
        even_steps: How to handle a batch that does not divide evenly: `"drop"`, `"pad"`, `"error"`; None lets the
            parts differ by one row.

    Returns:
        The same number of batches, some of them possibly empty.

    Raises:
        OptionError: if the elements are no batches, or do not divide evenly with `"error"`.
    """
    rows = _static_rows(dataset.element_spec)
    if even_steps == "error" and rows is not None and rows % parts:
        raise uneven(rows, parts, "rows of a batch")
    if even_steps == "pad":
        require_weights_fit(dataset.element_spec)
    elif parts == 1:
        return dataset
    in_tuple = isinstance(dataset.element_spec, tuple)

    def own(*elements: Any) -> Any:
        batch = elements if in_tuple else elements[0]
        total = rows if rows is not None else _count_rows(batch)
        indices = _row_indices(total, parts, index, even_steps)
        if even_steps == "pad":
            taken = _gather(batch, tf.minimum(indices, total - 1))
            return with_weight(taken, indices >= total, tf.size(indices))
        return _gather(batch, indices)

    return dataset.map(own)


def steps_of_own_data(
    dataset: tf.data.Dataset, batch_size: int | None, replicas: int, first_replica: int, devices: int
) -> tf.data.Dataset | None:
    """Splits a sharded dataset into one batch per step and device of this process, where TensorFlow would not.

    Args:
        dataset: The worker's shard, batched.
        batch_size: The rows of its batches; None if unknown.
        replicas: The number of replicas in all processes.
        first_replica: The first replica of this process, from 0.
        devices: The number of replicas in this process.

    Returns:
        The batches of the replicas in turn. None if TensorFlow splits these batches correctly.

    Raises:
        OptionError: if the data was padded after `batch`, or a later `map` dropped the sample weights.
    """
    is_padded = has_mark(dataset, PADDED)
    if is_padded:
        require_weights_kept(dataset.element_spec)
        require_weights_of_rows(dataset.element_spec)
    if has_mark(dataset, ROWS_OF_BATCHES):
        steps = dataset if devices == 1 else _by_device(dataset, devices)
    elif not is_padded:
        return None
    elif batch_size is None:
        steps = _by_device(dataset, replicas)
    else:
        # As in TensorFlow: the parts of a batch differ by at most one row, and every step covers the whole batch.
        sizes = [rows_of(batch_size, replicas, i)[1] for i in range(replicas)]
        steps = dataset.rebatch(sizes[first_replica:] + sizes[:first_replica])
    return steps.map(without_padding) if is_padded else steps


def _by_device(dataset: tf.data.Dataset, devices: int) -> tf.data.Dataset:
    """Splits every batch into one for each device."""
    in_tuple = isinstance(dataset.element_spec, tuple)

    def each(*elements: Any) -> tf.data.Dataset:
        batch = elements if in_tuple else elements[0]
        total = _count_rows(batch)
        return tf.data.Dataset.range(devices, output_type=tf.int32).map(
            lambda device: _gather(batch, _row_indices(total, devices, device, None))
        )

    return dataset.flat_map(each)


def _row_indices(total: Any, parts: int, index: Any, even_steps: str | None) -> tf.Tensor:
    """Returns the row indices of a part; padding has indices beyond the last row."""
    each, more = total // parts, total % parts
    if even_steps == "pad":
        size = each + tf.cast(more > 0, tf.int32)
        return index * size + tf.range(size)
    if even_steps == "drop":
        return index * each + tf.range(each)
    if even_steps == "error" and not isinstance(total, int):
        message = f'The number of rows of a batch must be a multiple of {parts} workers with even_steps="error".'
        with tf.control_dependencies([tf.debugging.assert_equal(more, 0, message)]):
            total = tf.identity(total)
    first, count = rows_of(total, parts, index)
    return tf.range(first, first + count)


def _gather(batch: Any, indices: tf.Tensor) -> Any:
    def rows(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            return _sparse_rows(value, indices)
        if isinstance(value, tf.RaggedTensor) or value.shape.rank != 0:
            return tf.gather(value, indices)
        return value  # A scalar holds for the whole batch.

    return tf.nest.map_structure(rows, batch)


def _sparse_rows(value: tf.SparseTensor, indices: tf.Tensor) -> tf.SparseTensor:
    width = tf.cast(value.dense_shape[1:], tf.int64)
    count = tf.size(indices, tf.int64)
    first = tf.cond(count > 0, lambda: tf.cast(indices[0], tf.int64), lambda: tf.constant(0, tf.int64))
    return tf.sparse.slice(value, tf.concat([[first], tf.zeros_like(width)], 0), tf.concat([[count], width], 0))


def _static_rows(element_spec: Any) -> int | None:
    """Returns the rows of every batch; None if unknown."""
    for spec in tf.nest.flatten(element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank != 0:
            return None if shape.rank is None else shape[0]
    raise OptionError(
        explain(
            '`dataset` must hold batches with policy="batch", which gives each worker its rows of every batch.',
            received=f"elements without a first dimension: {element_spec}",
            do="Call `dataset.batch(global_batch_size)` first.",
        )
    )


def _count_rows(batch: Any) -> tf.Tensor:
    for value in tf.nest.flatten(batch):
        if isinstance(value, tf.RaggedTensor):
            return tf.cast(value.nrows(), tf.int32)
        if isinstance(value, tf.SparseTensor):
            return tf.cast(value.dense_shape[0], tf.int32)
        if value.shape.rank != 0:
            return tf.shape(value)[0]
    raise AssertionError("_static_rows has found a first dimension")
