"""Lets all replicas take the same branch where a step chooses by a number of the batch: `tf.cond(loss > 1, ...)`.

The condition of one process compares a number of all rows. So the number is computed for the global batch, before the
branch. Conditions on the number of rows stay those of a replica: its branches take as many rows as it has. So do
conditions on rows (`x[0, 0] > 0`), whose branches must not communicate: another replica may take the other one. One
process draws one random number (`tf.random.uniform([]) < 0.5`): all replicas take that of the first.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers
from tfdistkit.strategies.sync.aggregates.graph_copies import copied
from tfdistkit.strategies.sync.aggregates.row_reader import reader_of
from tfdistkit.strategies.sync.gradients import trial

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
# The branches of an `if`, `and` or `x if y else z` of the user's, as AutoGraph wraps them.
_AUTOGRAPH = "tensorflow.python.autograph.operators."


def cond(original: Any, pred: Any, true_fn: Any = None, false_fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Hook of `tf.cond` in a graph, `ops.cond` and AutoGraph's `if` included, where the user wrote it.

    Args:
        original: TensorFlow's own function.
        pred: The condition.
        true_fn: As in TensorFlow.
        false_fn: As in TensorFlow.
        args: As in TensorFlow.
        kwargs: As in TensorFlow.

    Returns:
        The result of TensorFlow's own function.
    """
    step = steps.current()
    module = str(getattr(true_fn, "__module__", ""))
    is_of_user = not module.startswith(_LIBRARIES) or module.startswith(_AUTOGRAPH)
    if step is None or not is_of_user or step.in_update:
        return original(pred, true_fn, false_fn, *args, **kwargs)
    before = step.own_condition
    if tf.is_symbolic_tensor(pred) and pred.shape.rank == 0:
        pred = _of_global_batch(step, trial.condition(pred))
        if before is None and _is_of_own_rows(step, pred):
            step.own_condition = pred
        elif before is None:
            pred = _of_first_replica(step, pred)
    found: list[bool] = []
    branches = [_choosing(step, branch, found) for branch in (true_fn, false_fn)]
    try:
        result = original(pred, *branches, *args, **kwargs)
    finally:
        step.own_condition = before
    if found and all(found) and (before is not None or not _is_of_own_rows(step, pred)):
        _note_same(step, result)
    return result


def _choosing(step: steps.ReplicaStep, branch: Any, found: list[bool]) -> Any:
    """Lets a branch that is a condition (the second one of AutoGraph's `and`) compare numbers of the global batch.

    Args:
        step: The step of this replica.
        branch: The function of the branch.
        found: Gets, for each branch with a single condition, whether it is the same on all replicas.
    """
    if not callable(branch):
        return branch

    @functools.wraps(branch)
    def chosen() -> Any:
        result = branch()
        if not (tf.is_symbolic_tensor(result) and result.dtype == tf.bool and result.shape.rank == 0):
            found.append(False)
            return result
        whole = _of_global_batch(step, result)
        found.append(whole is not result or not _is_of_own_rows(step, result))
        return whole

    return chosen


def _note_same(step: steps.ReplicaStep, result: Any) -> None:
    if tf.is_symbolic_tensor(result) and result.graph is step.graph:  # Names of inner graphs are not unique.
        step.same_on_all.update((result.name, *(one.name for one in result.op.inputs[:1])))


def require_same_branch(step: steps.ReplicaStep | None) -> None:
    """Checks that no sum over the replicas is in a branch that only some of them take; called before each.

    Args:
        step: The step of this replica; None for none.

    Raises:
        UnsupportedError: if it is.
    """
    if step is None or step.own_condition is None:
        return
    raise UnsupportedError(
        explain(
            "A branch that each replica chooses by its own rows must not update weights or metrics: replicas that take "
            "the other branch would leave these waiting.",
            received=f"a condition computed by {step.own_condition.op.type}, and a sum over the replicas in a branch",
            expected="a condition on a number of the batch (a loss, `ops.mean(x) > 0`, `tf.reduce_any(...)`), on a "
            "variable, or on what `tfdistkit.collectives.all_reduce` returns",
            do="Update in every step, and choose values instead: `gradient * ops.cast(condition, gradient.dtype)`.",
        )
    )


def _of_global_batch(step: steps.ReplicaStep, condition: tf.Tensor) -> tf.Tensor:
    if condition.shape.rank != 0:
        return condition
    outer, graph = in_graph_of_step(step, condition), step.graph
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


def _is_of_own_rows(step: steps.ReplicaStep, condition: tf.Tensor) -> bool:
    outer = in_graph_of_step(step, condition)
    if outer is None or step.is_eager or step.is_local or not step.in_keras_step:
        return False
    reader = reader_of(step)

    def has_rows(tensor: tf.Tensor) -> bool:  # Other tensors of a batch are the same for all rows.
        return graphs.is_from_dataset(tensor) and reader.axis_of_rows(tensor) is not None

    return graphs.Ancestry(has_rows, step.same_on_all, graphs.is_collective).includes(outer)


def _of_first_replica(step: steps.ReplicaStep, condition: tf.Tensor) -> tf.Tensor:
    """Returns a random condition as the first replica draws it; any other one as it is."""
    outer, graph = in_graph_of_step(step, condition), step.graph
    if outer is None or graph is None or step.is_local or not step.in_keras_step:
        return condition
    reader = reader_of(step)
    if reader.comes_from_batch(outer) or not reader.is_random(outer):
        return condition
    with graph.as_default():
        drawn = tf.cast(outer, tf.float32) if step.replica_id == 0 else tf.zeros([])
        return step.sum(drawn) > 0.5


def in_graph_of_step(step: steps.ReplicaStep, tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns what a branch captured as a tensor; None for what the branch computes.

    Args:
        step: The step of this replica, in a graph.
        tensor: A tensor of the step or of a branch.
    """
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
