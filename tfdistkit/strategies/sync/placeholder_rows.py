"""Gives replicas without rows a placeholder row, and removes its outputs.

Convolutions, CTC and metric functions crash on zero rows, or return NaN. In a Keras step such a replica gets one row of
weight zero: a row of the batch if the batch is available (`batch_sharding`), else a row of zeros.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.data.rows import count_rows
from tfdistkit.errors import UnsupportedError, explain


def with_placeholder(data: Any, is_empty: Any) -> Any:
    """Adds a placeholder row of zeros to a batch without rows.

    Args:
        data: Any structure of tensors, the values of one replica.
        is_empty: Whether it has no rows, a scalar bool tensor.
    """

    def filled(value: Any) -> Any:
        counted = count_rows(value) if tf.is_tensor(value) or isinstance(value, tf.RaggedTensor) else None
        if counted is None or counted[1]:
            return value
        if isinstance(value, tf.RaggedTensor):
            inner = value.with_row_splits_dtype(value.row_splits.dtype)
            empty_row = tf.RaggedTensor.from_row_splits(inner.values[:0], tf.zeros([2], inner.row_splits.dtype))
            return tf.cond(is_empty, lambda: tf.concat([inner, empty_row], 0), lambda: inner)
        if isinstance(value, tf.SparseTensor):
            shape = tf.maximum(value.dense_shape, tf.cast(is_empty, tf.int64))
            return tf.SparseTensor(value.indices, value.values, shape)
        shape = tf.where(is_empty, tf.maximum(tf.shape(value), 1), tf.shape(value))
        row = tf.cond(is_empty, lambda: tf.zeros(shape, value.dtype), lambda: tf.identity(value))
        row.set_shape([None, *value.shape[1:]])
        # So that the graph of the step begins here: the condition is no number that its rows are compared with.
        return row if tf.executing_eagerly() else _with_unknown_rows(row)

    return tf.nest.map_structure(filled, data)


def without_placeholder(outputs: Any, is_empty: Any) -> Any:
    """Removes the outputs of a placeholder row.

    Args:
        outputs: The outputs of a replica, any structure of tensors.
        is_empty: Whether the replica had no rows, a scalar bool tensor.
    """

    def kept(value: Any) -> Any:
        if not tf.is_tensor(value) or isinstance(value, tf.SparseTensor) or value.shape.rank == 0:
            return value
        if isinstance(value, tf.RaggedTensor):
            return value[: tf.where(is_empty, tf.zeros([], tf.int64), tf.cast(value.nrows(), tf.int64))]
        return value[: tf.where(is_empty, 0, tf.shape(value)[0])]

    return tf.nest.map_structure(kept, outputs)


def hide_rows(values: Any, rows: int = 0) -> Any:
    """Hides from the traced graph how many rows a replica has.

    Layers such as LSTM cannot be traced for a batch that is statically empty, but can run on an empty batch. And where
    state counts rows, a number of them that is a constant in the graph cannot be told from others.

    Args:
        values: Any structure of tensors, the values of one replica.
        rows: The number to hide; by default, that there are none.

    Returns:
        The structure, with an unknown number of rows where this number was known while tracing.
    """

    def hide(value: Any) -> Any:
        if not tf.is_tensor(value) or not hasattr(value, "shape") or isinstance(value, tf.Variable):
            return value
        if tf.executing_eagerly() or value.shape.rank in (None, 0) or value.shape[0] != rows:
            return value
        return _with_unknown_rows(value)

    return tf.nest.map_structure(hide, values)


def _with_unknown_rows(value: Any) -> Any:
    hidden = tf.compat.v1.placeholder_with_default
    if isinstance(value, tf.SparseTensor):
        others = [-1 if size is None else size for size in value.shape[1:]]
        sizes = [value.dense_shape[i + 1] if size < 0 else tf.constant(size, tf.int64) for i, size in enumerate(others)]
        return tf.SparseTensor(value.indices, value.values, tf.stack([hidden(value.dense_shape[0], []), *sizes]))
    if not isinstance(value, tf.RaggedTensor):
        return hidden(value, [None, *value.shape[1:]])
    if value.uniform_row_length is None:
        return tf.RaggedTensor.from_row_splits(value.values, hidden(value.row_splits, [None]), validate=False)
    rows = hidden(value.nrows(), [])
    return tf.RaggedTensor.from_uniform_row_length(value.values, value.uniform_row_length, rows, validate=False)


def warn_without_rows(step: Any) -> None:
    """Warns that a function of `strategy.run` is traced for no rows: some layers raise errors that do not say so."""
    if step is None or step.is_eager or step.has_placeholder or step.held_rows != 0:
        return
    warnings.warn(
        explain(
            f"Replica {step.replica_id} has no rows of this batch, and runs your function on none.",
            received=f"a batch with fewer rows than the {step.replicas} replicas",
            do="If an error follows (a convolution, BatchNormalization), batch with `drop_remainder=True`, or train "
            "with `fit`, where such a replica has a row of weight 0.",
        ),
        stacklevel=2,
    )


@contextlib.contextmanager
def explaining_errors(step: Any) -> Iterator[None]:
    """Explains an error of a custom eager step on no rows, where no placeholder can be: its loss would count.

    Args:
        step: The step (`ReplicaStep`); None for none.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if step is None or not step.is_eager or step.in_keras_step or step.held_rows != 0:
            raise
        raise UnsupportedError(
            explain(
                f"Replica {step.replica_id} has no rows of this batch, and a layer cannot run on none.",
                received=str(error.message).strip().splitlines()[0][:200],
                expected=f"at least one row for each of the {step.replicas} replicas in your own loop",
                do="Batch with `drop_remainder=True`, or train with `fit`, where such a replica has a row of weight 0.",
            )
        ) from error
