"""Sums of IndexedSlices over the replicas, whose numbers of rows differ between replicas and between steps.

TensorFlow gathers them, and pads them to the longest. Two cases fail there: no replica has a row, and a loop in a
function (`steps_per_execution`), whose iterations share the key of a collective, which takes one shape.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync import collective_keys
from tfdistkit.strategies.sync import step as steps


def sum_over_replicas(gradients: list[Any]) -> list[Any]:
    """Sums gradients over the replicas; called in each of them.

    Args:
        gradients: Tensors or IndexedSlices.

    Returns:
        The sums, the same on all replicas. The rows of IndexedSlices are concatenated in the order of the replicas.
    """
    context = tf.distribute.get_replica_context()
    looped = [i for i, gradient in enumerate(gradients) if _changes_in_a_loop(gradient)]
    others = [i for i in range(len(gradients)) if i not in looped]
    sums = dict(zip(others, _all_reduce(context, [_with_a_row(gradients[i]) for i in others]) if others else []))
    for i in looped:
        sums[i] = _sum_padded(context, gradients[i])
    return [sums[i] for i in range(len(gradients))]


def _all_reduce(context: Any, values: Any) -> Any:
    if not isinstance(values, list):
        return context.all_reduce(tf.distribute.ReduceOp.SUM, values)
    # TensorFlow packs all of a call into one tensor, which has one dtype.
    sums: dict[int, Any] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):  # The same order on every replica.
        of_dtype = [i for i, value in enumerate(values) if value.dtype == dtype]
        sums.update(zip(of_dtype, context.all_reduce(tf.distribute.ReduceOp.SUM, [values[i] for i in of_dtype])))
    return [sums[i] for i in range(len(values))]


def _with_a_row(gradient: Any) -> Any:
    """Gives IndexedSlices without rows one of zeros: TensorFlow crashes when all replicas gather nothing.

    That happens to a table, or a part of one, from which a batch looked nothing up.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    return _padded(gradient, tf.cast(tf.equal(tf.size(gradient.indices), 0), tf.int32))


def _padded(slices: tf.IndexedSlices, more: tf.Tensor) -> tf.IndexedSlices:
    values = tf.pad(slices.values, [[0, more], *[[0, 0]] * (slices.values.shape.rank - 1)])
    return tf.IndexedSlices(values, tf.pad(slices.indices, [[0, more]]), slices.dense_shape)


def _changes_in_a_loop(gradient: Any) -> bool:
    """Returns whether a gradient may have other numbers of rows in other iterations of a loop.

    A number that is known while tracing counts in a Keras step alone, which hides the rows of the batch. In a loop of
    the user's own each replica knows its own, and the others must take the same way.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return False
    step = steps.current()
    if gradient.indices.shape.is_fully_defined() and step is not None and step.in_keras_step:
        return False
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(graph, "is_control_flow_graph", False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _sum_padded(context: Any, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums IndexedSlices that are padded to one of few sizes, each with keys of its own."""
    own = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync, dtype=tf.int32)
    length = tf.size(slices.indices)
    lengths = _all_reduce(context, own * length)
    number, size = collective_keys.size_above(tf.reduce_max(lengths))
    with collective_keys.of_size(number):
        gathered = _all_reduce(context, _padded(slices, size - length))
    is_row = tf.reshape(tf.sequence_mask(lengths, size), [-1])
    return tf.IndexedSlices(
        tf.boolean_mask(gathered.values, is_row), tf.boolean_mask(gathered.indices, is_row), slices.dense_shape
    )
