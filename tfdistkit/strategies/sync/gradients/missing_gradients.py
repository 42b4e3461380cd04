"""Adds zero gradients on an eager replica for variables that have a gradient on other replicas only.

An eager replica may take another branch than its peers, depending on its rows, and then lacks gradients that they have.
In a graph both branches are traced, so all replicas have the same gradients.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync.step import ReplicaStep

# The sum of these codes over the replicas tells which kinds of a gradient exist.
_DENSE, _SPARSE = 1, 1 << 16


def added(step: ReplicaStep, gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Returns the gradients of an eager replica, with zeros where only other replicas have one.

    Args:
        step: The step of this replica; all replicas call this.
        gradients: Tensors, IndexedSlices and None.
        variables: The variable of each gradient.
    """
    kinds = [0 if g is None else _SPARSE if isinstance(g, tf.IndexedSlices) else _DENSE for g in gradients]
    if not kinds:
        return gradients
    found = step.sum(tf.constant(kinds, tf.int32)).numpy()
    return [_as_others(*one) for one in zip(gradients, variables, found)]


def _as_others(gradient: Any, variable: Any, found: int) -> Any:
    is_sparse, is_dense = found >= _SPARSE, bool(found % _SPARSE)
    if gradient is None and is_dense:
        return tf.zeros(variable.shape, variable.dtype)
    if gradient is None and is_sparse:
        nothing = tf.zeros([0, *variable.shape[1:]], variable.dtype)
        return tf.IndexedSlices(nothing, tf.zeros([0], tf.int32), tf.constant(variable.shape, tf.int32))
    return tf.convert_to_tensor(gradient) if is_sparse and is_dense else gradient
