"""Lets all replicas take the same branch where a step chooses by a number of the batch: `tf.cond(loss > 1, ...)`.

The condition of one process compares a number of all rows. So the number is computed for the global batch, before the
branch. Conditions on the number of rows stay those of a replica: its branches take as many rows as it has.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers
from tfdistkit.strategies.sync.aggregates.graph_copies import copied

# Compare numbers, or combine conditions.
CHOICES = frozenset(
    (
        *("Greater", "GreaterEqual", "Less", "LessEqual", "Equal", "NotEqual", "IsNan", "IsInf", "IsFinite"),
        *("LogicalAnd", "LogicalOr", "LogicalNot", "Identity"),
    )
)
# What a branch may compute from numbers outside of it before it compares them.
_REPEATED = CHOICES | {"Mul", "AddV2", "Sub", "RealDiv", "Neg", "Abs", "Sqrt", "Square", "Log", "Exp"}
_OF_ROWS = ("Any", "All")
# Their branches know which rows they have: those of a replica without rows, for example.
_LIBRARIES = ("tfdistkit.", "keras.", "tensorflow.")


def cond(original: Any, pred: Any, true_fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of `tf.cond` in a graph, `ops.cond` and AutoGraph's `if` included, where the user wrote it.

    Args:
        original: TensorFlow's own function.
        pred: The condition.
        true_fn: As in TensorFlow.
        args: As in TensorFlow.
        kwargs: As in TensorFlow.

    Returns:
        The result of TensorFlow's own function.
    """
    step = steps.current()
    is_of_user = not str(getattr(true_fn, "__module__", "")).startswith(_LIBRARIES)
    if step is None or not is_of_user or step.gradients_are_reduced:
        return original(pred, true_fn, *args, **kwargs)
    if tf.is_symbolic_tensor(pred) and pred.shape.rank == 0:
        pred = _of_global_batch(step, pred)
    return original(pred, true_fn, *args, **kwargs)


def _of_global_batch(step: steps.ReplicaStep, condition: tf.Tensor) -> tf.Tensor:
    if condition.shape.rank != 0:
        return condition
    outer, graph = _in_graph_of_step(step, condition), step.graph
    if outer is not None and graph is not None:
        with graph.as_default():
            number = _number(step, outer)
        if number is not None:
            return number
    if condition.op.type not in (_REPEATED if outer is None else CHOICES):
        return condition
    pairs = [(one, _of_global_batch(step, one)) for one in condition.op.inputs]
    others = {place: new for place, (one, new) in enumerate(pairs) if new is not one}
    return copied(condition, others) if others else condition


def _in_graph_of_step(step: steps.ReplicaStep, tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns what a branch captured as a tensor; None for what the branch computes."""
    while tensor.graph is not step.graph:
        captured = [outer for outer, inner in getattr(tensor.graph, "captures", ()) if inner is tensor]
        if not captured or not tf.is_symbolic_tensor(captured[0]):
            return None
        tensor = captured[0]
    return tensor


def _number(step: steps.ReplicaStep, tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns a number, or whether any or all rows meet a condition, for the global batch; None if not known."""
    if tensor.dtype != tf.bool:
        number = global_numbers.of_global_batch(step, tensor, of_means=True)
        return None if number is None else number.value
    if tensor.op.type not in _OF_ROWS:
        return None
    number = global_numbers.of_global_batch(step, tf.cast(tensor, tf.float32), of_means=True)
    return None if number is None else number.value > 0.5
