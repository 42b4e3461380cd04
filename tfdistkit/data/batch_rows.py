"""Each worker's rows of every global batch, cut out by the worker itself."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import PADDED, ROWS_OF_BATCHES, has_mark
from tfdistkit.data.padding import require_weights_fit, require_weights_kept, weighted, without_padding
from tfdistkit.data.rows import rows_of
from tfdistkit.data.shard_spec import uneven
from tfdistkit.errors import OptionError, explain


def rows_of_batches(dataset: tf.data.Dataset, parts: int, index: int, even_steps: str | None) -> tf.data.Dataset:
    """Keeps one part of every batch: consecutive rows, in the order of the parts.

    Args:
        dataset: A dataset of global batches, the same on every worker.
        parts: How many parts there are.
        index: Which of them to keep, from 0.
        even_steps: What to do if the parts do not divide the rows of a batch: `"drop"`, `"pad"`, `"error"`; None
            lets the parts differ by one row.

    Returns:
        As many batches, some of them perhaps without rows.

    Raises:
        OptionError: if the elements are no batches, or the parts do not divide their rows and shall.
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
        numbers = _numbers(total, parts, index, even_steps)
        if even_steps == "pad":
            taken = _gather(batch, tf.minimum(numbers, total - 1))
            return weighted(taken, numbers >= total, tf.size(numbers))
        return _gather(batch, numbers)

    return dataset.map(own)


def steps_of_own_data(
    dataset: tf.data.Dataset, batch_size: int | None, replicas: int, first_replica: int, devices: int
) -> tf.data.Dataset | None:
    """Turns what `shard` made into one batch for each step and device of this process, where TensorFlow would not.

    Args:
        dataset: The worker's own data, batched.
        batch_size: The rows of its batches, if they are known.
        replicas: How many replicas there are in all processes.
        first_replica: The number of the first one of this process.
        devices: How many replicas this process has.

    Returns:
        The batches of the replicas in turn. None if TensorFlow's way of cutting batches is right.

    Raises:
        OptionError: if the data was padded, and something took the weights of the padding away.
    """
    is_padded = has_mark(dataset, PADDED)
    if is_padded:
        require_weights_kept(dataset.element_spec)
    if has_mark(dataset, ROWS_OF_BATCHES):
        steps = dataset if devices == 1 else _by_device(dataset, devices)
    elif not is_padded:
        return None
    elif batch_size is None:
        steps = _by_device(dataset, replicas)
    else:
        # As TensorFlow does it: the parts of a batch differ by at most one row, and every step has the whole batch.
        sizes = [batch_size // replicas + (i < batch_size % replicas) for i in range(replicas)]
        steps = dataset.rebatch(sizes[first_replica:] + sizes[:first_replica])
    return steps.map(without_padding) if is_padded else steps


def _by_device(dataset: tf.data.Dataset, devices: int) -> tf.data.Dataset:
    """Cuts every batch into one for each device."""
    in_tuple = isinstance(dataset.element_spec, tuple)

    def each(*elements: Any) -> tf.data.Dataset:
        batch = elements if in_tuple else elements[0]
        total = _count_rows(batch)
        return tf.data.Dataset.range(devices, output_type=tf.int32).map(
            lambda device: _gather(batch, _numbers(total, devices, device, None))
        )

    return dataset.flat_map(each)


def _numbers(total: Any, parts: int, index: Any, even_steps: str | None) -> tf.Tensor:
    """The numbers of a part's rows; with padding they go on after the last row."""
    each, more = total // parts, total % parts
    if even_steps == "pad":
        size = each + tf.cast(more > 0, tf.int32)
        return index * size + tf.range(size)
    if even_steps == "drop":
        return index * each + tf.range(each)
    if even_steps == "error" and not isinstance(total, int):
        said = f'The workers do not divide the rows of a batch (even_steps="error", {parts} workers).'
        with tf.control_dependencies([tf.debugging.assert_equal(more, 0, said)]):
            total = tf.identity(total)
    first, count = rows_of(total, parts, index)
    return tf.range(first, first + count)


def _gather(batch: Any, numbers: tf.Tensor) -> Any:
    def rows(value: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            return _sparse_rows(value, numbers)
        if isinstance(value, tf.RaggedTensor) or value.shape.rank != 0:
            return tf.gather(value, numbers)
        return value  # One value for the whole batch.

    return tf.nest.map_structure(rows, batch)


def _sparse_rows(value: tf.SparseTensor, numbers: tf.Tensor) -> tf.SparseTensor:
    width = tf.cast(value.dense_shape[1:], tf.int64)
    count = tf.size(numbers, tf.int64)
    first = tf.cond(count > 0, lambda: tf.cast(numbers[0], tf.int64), lambda: tf.constant(0, tf.int64))
    return tf.sparse.slice(value, tf.concat([[first], tf.zeros_like(width)], 0), tf.concat([[count], width], 0))


def _static_rows(element_spec: Any) -> int | None:
    """Returns the rows of every batch if they are known."""
    for spec in tf.nest.flatten(element_spec):
        shape = getattr(spec, "shape", None)
        if shape is not None and shape.rank != 0:
            return None if shape.rank is None else shape[0]
    raise OptionError(
        explain(
            '`dataset` holds no batches, and `policy="batch"` gives each worker its rows of every batch.',
            received=f"elements like {element_spec}",
            expected="elements with a first dimension",
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
    raise AssertionError("checked before")
