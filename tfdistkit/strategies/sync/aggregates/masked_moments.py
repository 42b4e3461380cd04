"""The mean and variance of masked inputs for `BatchNormalization(synchronized=True)`, over the rows of all replicas.

Keras adds these up over the rows of one replica where there is a mask, whatever `synchronized` says.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdistkit.keras_adapter import private_api


def moments(original: Any, layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """Hook of `BatchNormalization._moments`.

    Args:
        original: Keras's own function.
        layer: The layer.
        inputs: Its inputs.
        mask: Their mask, or None: without one, Keras itself synchronizes.

    Returns:
        The mean and the variance for each feature.
    """
    context = tf.distribute.get_replica_context() if mask is not None and layer.synchronized else None
    if context is None or not private_api.is_ours(context.strategy):
        return original(layer, inputs, mask)
    axis = layer.axis % inputs.shape.rank
    axes = [i for i in range(inputs.shape.rank) if i != axis]
    is_valid = tf.cast(tf.broadcast_to(tf.expand_dims(mask, -1), tf.shape(inputs)), tf.bool)
    own = [tf.where(is_valid, inputs, 0), tf.cast(is_valid, inputs.dtype)]
    total, weight = context.all_reduce("SUM", [tf.reduce_sum(one, axes, keepdims=True) for one in own])
    weight += keras.config.epsilon()
    mean = total / weight
    squares = tf.square(tf.where(is_valid, inputs - mean, 0))
    variance = context.all_reduce("SUM", tf.reduce_sum(squares, axes, keepdims=True)) / weight
    return tf.squeeze(mean), tf.squeeze(variance)
