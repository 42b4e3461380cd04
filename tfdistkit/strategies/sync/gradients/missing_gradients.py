"""Gradients that an eager replica has not, and another has: it took another branch, for its rows alone.

A graph holds both branches, so the replicas have the same gradients.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync.step import ReplicaStep

# A sum of these over the replicas tells which kinds there are.
_DENSE, _SPARSE = 1, 1 << 16


def added(step: ReplicaStep, gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Returns the gradients of an eager replica, with zeros where only other replicas have one.

    Args:
        step: The step of this replica; all replicas call this.
        gradients: Tensors, IndexedSlices and None.
        variables: The variable of each.
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
