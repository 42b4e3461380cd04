"""Reads only the looked-up rows of large tables, and lets optimizers that support it update only those.

Keras gathers from a variable as from a tensor, so TensorFlow reads the whole table in every step: over the network if
the table is on a parameter server, else as a copy, because a variable with row updates cannot be read without one.
TensorFlow's `sparse_read` reads only the rows.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdistkit.keras_adapter import private_api


def take(original: Any, x: Any, indices: Any, axis: int | None = None) -> Any:
    """Hook of Keras's `take`, which `Embedding` calls: returns the same rows with the same gradient."""
    variable = None
    if axis == 0 and isinstance(x, keras.Variable) and private_api.is_ours(tf.distribute.get_strategy()):
        variable = private_api.readable_by_rows(x)
    if variable is None or isinstance(indices, tf.SparseTensor):
        return original(x, indices, axis)

    def rows(ids: Any) -> Any:
        ids = tf.where(ids < 0, ids + tf.cast(x.shape[0], ids.dtype), ids)
        # Mixed precision: casts the rows, where Keras casts the table.
        return tf.cast(variable.sparse_read(ids), x.dtype)

    if isinstance(indices, tf.RaggedTensor):
        return tf.ragged.map_flat_values(rows, indices)
    return rows(keras.ops.convert_to_tensor(indices))


def read_rows(variable: Any, ids: Any) -> Any:
    """Reads rows of a variable.

    Args:
        variable: A Keras variable.
        ids: Row numbers, an integer tensor of any shape.

    Returns:
        A tensor of the variable's own dtype and the shape `[*ids.shape, *variable.shape[1:]]`.
    """
    readable = private_api.readable_by_rows(variable)
    return tf.gather(variable.value, ids) if readable is None else readable.sparse_read(ids)


def adagrad_step(original: Any, optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> Any:
    """Hook of Adagrad's `update_step`: computes Keras's update only for rows with a gradient.

    Under Adagrad a row without a gradient does not change, but Keras takes the root of the whole accumulator in every
    step. With `epsilon=0`, a possible division by zero, Keras's own update runs.
    """
    by_rows = isinstance(gradient, tf.IndexedSlices) and private_api.is_ours(tf.distribute.get_strategy())
    accumulator = private_api.adagrad_accumulator(optimizer, variable) if by_rows and optimizer.epsilon > 0 else None
    if accumulator is None or private_api.readable_by_rows(accumulator) is None:
        return original(optimizer, gradient, variable, learning_rate)
    rate = tf.cast(learning_rate, variable.dtype)
    gradient = keras.ops.cast(gradient, variable.dtype)
    optimizer.assign_add(accumulator, keras.ops.square(gradient))
    root = tf.sqrt(read_rows(accumulator, gradient.indices) + tf.cast(optimizer.epsilon, variable.dtype))
    change = tf.IndexedSlices(rate * gradient.values / root, gradient.indices, gradient.dense_shape)
    optimizer.assign_sub(variable, change)
    return None


def clip_by_global_norm(original: Any, value_list: Any, clip_norm: Any) -> Any:
    """Hook of Keras's `clip_by_global_norm`: keeps sparse gradients sparse, where Keras makes them dense.

    As in a dense gradient, the values of a repeated row are summed.
    """
    gradients = list(value_list)
    slices = [i for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    if not slices or not private_api.is_ours(tf.distribute.get_strategy()):
        return original(gradients, clip_norm)
    # Keras computes the norm of the unsummed values: a repeated row counts twice.
    clipped = original([g.values if i in slices else g for i, g in enumerate(gradients)], clip_norm)
    for i in slices:
        ids, place = tf.unique(gradients[i].indices)
        values = tf.math.unsorted_segment_sum(clipped[i], place, tf.size(ids))
        clipped[i] = tf.IndexedSlices(values, ids, gradients[i].dense_shape)
    return clipped
