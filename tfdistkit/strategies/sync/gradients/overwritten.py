"""Values that Keras assigns to variables by their gradients: scales and extremes of float8 layers.

A variable with `overwrite_with_gradient` gets its gradient as its new value. It is an extreme over the rows, or comes
from the variables alone. Keras takes the largest of the batches of an accumulation; that of the replicas is the value
for the global batch.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync import step as steps


def is_overwritten(variable: Any) -> bool:
    """Returns whether a variable gets its gradient as its new value.

    Args:
        variable: A variable of Keras or TensorFlow.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def largest(step: steps.ReplicaStep, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the elementwise largest values of the replicas that have rows.

    Args:
        step: The step of this replica.
        values: Values of this replica, of static shapes.
    """
    if not values or step.replicas == 1:
        return values
    own = tf.concat([tf.reshape(tf.cast(value, tf.float32), [-1]) for value in values], 0)
    least = own.dtype.min
    is_own = tf.range(step.replicas)[:, None] == step.replica_id
    of_replicas = step.sum(tf.where(is_own, step.if_any_rows(own, least)[None], 0))
    sizes = [value.shape.num_elements() for value in values]
    found = tf.split(tf.reduce_max(of_replicas, 0), sizes)
    return [tf.cast(tf.reshape(one, value.shape), value.dtype) for one, value in zip(found, values)]
