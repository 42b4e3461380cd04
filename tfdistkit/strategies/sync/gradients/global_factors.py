"""Numbers of the batch with which a step changes its gradients after the tape, computed for the global batch.

Such as the number of rows that it divides by, or a switch: `gradient * ops.cast(loss > 1, "float32")`. The gradients of
the replicas add up, so each must be changed by the same number: by that of all rows, and not by that of its own.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers
from tfdistkit.strategies.sync.aggregates.graph_copies import copied

# Linear in gradients, with numbers beside them.
_LINEAR = frozenset(("AddV2", "Sub", "Neg", "Mul", "RealDiv", "DivNoNan", "Select", "SelectV2"))
# Choose by numbers.
_CHOICES = frozenset(
    (
        *("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual"),
        *("LogicalAnd", "LogicalOr", "LogicalNot"),
    )
)
_MOST_OPERATIONS = 8


def with_global_factors(step: steps.ReplicaStep, gradient: Any) -> Any:
    """Replaces numbers of this replica in what a step computed from a gradient by those of the global batch.

    Args:
        step: The step of this replica.
        gradient: A gradient as the step gives it to the optimizer: a tensor, IndexedSlices or None.

    Returns:
        The gradient, changed by numbers of the global batch.
    """
    if not step.in_keras_step or step.is_eager or step.is_in_inner_graph() or not tf.is_symbolic_tensor(gradient):
        return gradient
    return _replaced(step, gradient, _MOST_OPERATIONS) if _is_of_gradients(step, gradient) else gradient


def _is_of_gradients(step: steps.ReplicaStep, tensor: tf.Tensor) -> bool:
    """Returns whether a tensor was computed from gradients of the tape, by operations that are linear in them."""
    waiting, seen = [(tensor, _MOST_OPERATIONS)], 0
    while waiting and seen < 2**_MOST_OPERATIONS:
        one, left = waiting.pop()
        seen += 1
        if one.name in step.gradients:
            return True
        if left and one.op.type in _LINEAR:
            waiting += [(before, left - 1) for before in one.op.inputs]
    return False


def _replaced(step: steps.ReplicaStep, tensor: tf.Tensor, left: int) -> tf.Tensor:
    if tensor.name in step.gradients or not left:
        return tensor
    if tensor.shape.rank == 0 and tensor.dtype != tf.bool:
        number = global_numbers.of_global_batch(step, tensor, of_means=True)
        if number is not None:
            return number.value
    if tensor.op.type not in (_CHOICES if tensor.dtype == tf.bool else _LINEAR):
        return tensor
    pairs = [(one, _replaced(step, one, left - 1)) for one in tensor.op.inputs]
    others = {place: new for place, (one, new) in enumerate(pairs) if new is not one}
    return copied(tensor, others) if others else tensor
