"""A trial step: a train step that is traced once more to look at what it computes, and applies none (`step_check`).

While it is traced, `optimizer.apply` records gradients in place of applying them, and variables record what is written
to them by the step itself.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

_LOCAL = threading.local()
_is_tracing = False
# The branch that all conditions of the trial take; None for the one that the rows choose. And whether there are any.
_branch: bool | None = None
_has_branches = False


class CannotTryError(Exception):
    """A step cannot be traced on trial, because the trial would compute something else than the step."""


def is_tracing() -> bool:
    """Returns whether a trial step is being traced in this process."""
    return _is_tracing


@contextlib.contextmanager
def tracing(branch: bool | None = None) -> Iterator[None]:
    """Marks its body as the trace of a trial step, whose replicas may run in other threads.

    Args:
        branch: The branch that all its conditions take; None for the one that the rows choose.
    """
    global _is_tracing, _branch, _has_branches
    _is_tracing, _branch, _has_branches = True, branch, False
    try:
        yield
    finally:
        _is_tracing, _branch = False, None


def has_branches() -> bool:
    """Returns whether the last trial step that was traced has conditions in code of the user's."""
    return _has_branches


def condition(own: Any) -> Any:
    """Returns a condition of the user's, or the one that a trial step is to have.

    Args:
        own: The condition, a scalar tensor.
    """
    global _has_branches
    if not _is_tracing:
        return own
    _has_branches = True
    return own if _branch is None else tf.constant(_branch)


def in_order(collective: Callable[[], Any]) -> Any:
    """Runs a collective after the one before it in this replica: nothing else orders those of a trial step.

    GPUs of several processes deadlock if they begin them in different orders.

    Args:
        collective: Returns the result, a tensor.
    """
    graph = tf.compat.v1.get_default_graph()
    before = getattr(_LOCAL, "last", None)
    with tf.control_dependencies([before] if before is not None and before.graph is graph else []):
        result = collective()
    _LOCAL.last = result
    return result


class Merged(enum.Enum):
    """How what replicas write to a variable becomes one value."""

    MEAN = "mean"  # Weighted by rows; also what is equal on all replicas.
    SUM = "sum"
    FIRST = "first"  # Of the first replica.


class Write(NamedTuple):
    """What a step writes to a variable on a replica.

    Args:
        variable: The variable.
        change: By how much its value changes there.
        value: Its value after that.
        merged: How the changes of the replicas become one.
    """

    variable: Any
    change: tf.Tensor
    value: tf.Tensor
    merged: Merged


class Recorded(NamedTuple):
    """What a replica computes in a trial step, in the order of the step.

    Args:
        gradients: Each variable with this replica's part of its gradient; the parts add up to the gradient.
        writes: What the step writes to variables by itself.
        written: The value of each variable that it wrote, by the id of the variable.
    """

    gradients: list[tuple[Any, Any]]
    writes: list[Write]
    written: dict[int, tf.Tensor]


@contextlib.contextmanager
def recording() -> Iterator[Recorded]:
    """Records the gradients of a replica in place of applying them, and what its step writes to variables.

    Yields:
        What is recorded.
    """
    _LOCAL.recorded = recorded = Recorded([], [], {})
    try:
        yield recorded
    finally:
        _LOCAL.recorded = None


def record(variables: list[Any], parts: list[Any]) -> bool:
    """Records what a replica adds to the gradients of the global batch.

    Args:
        variables: The variables.
        parts: This replica's part of the gradient of each.

    Returns:
        Whether this is a trial step, which applies no gradients.
    """
    recorded = getattr(_LOCAL, "recorded", None)
    if recorded is None:
        return False
    recorded.gradients.extend(zip(variables, parts))
    return True


@contextlib.contextmanager
def assigning() -> Iterator[None]:
    """Marks its body as one that assigns values to variables; elsewhere they are added."""
    with _writing("assign"):
        yield


@contextlib.contextmanager
def subtracting() -> Iterator[None]:
    """Marks its body as one that subtracts values from variables; elsewhere they are added."""
    with _writing("subtract"):
        yield


@contextlib.contextmanager
def _writing(how: str) -> Iterator[None]:
    before, _LOCAL.how = getattr(_LOCAL, "how", "add"), how
    try:
        yield
    finally:
        _LOCAL.how = before


def record_write(variable: Any, value: Any, merged: Merged = Merged.MEAN, is_compared: bool = True) -> None:
    """Records what a step writes to a variable, if this is a trial step, which then reads it again (`written_value`).

    Args:
        variable: The variable.
        value: What is assigned (`assigning`), subtracted (`subtracting`) or added on this replica. Only dense numbers
            are recorded.
        merged: How the values of the replicas become one.
        is_compared: Whether the change is one of those that are compared with one process.
    """
    recorded, dtype = getattr(_LOCAL, "recorded", None), variable.dtype
    if recorded is None or isinstance(value, tf.IndexedSlices) or not (dtype.is_floating or dtype.is_integer):
        return
    given, before = (tf.cast(tf.convert_to_tensor(one), tf.float64) for one in (value, variable))
    how = getattr(_LOCAL, "how", "add")
    change = given - before if how == "assign" else -given if how == "subtract" else given
    after = given if how == "assign" else before + change
    recorded.written[id(variable)] = tf.cast(after, dtype)
    if is_compared:
        recorded.writes.append(Write(variable, change, after, merged))


def record_merged(variable: Any, value: tf.Tensor) -> None:
    """Records the mean over the replicas of what a trial step wrote to a variable, which it then reads again.

    Args:
        variable: The variable.
        value: The mean.
    """
    recorded = getattr(_LOCAL, "recorded", None)
    if recorded is not None and id(variable) in recorded.written:
        recorded.written[id(variable)] = value


def written_value(variable: Any) -> tf.Tensor | None:
    """Returns what this trial step wrote to a variable before, on this replica; None if it did not, or is no trial.

    A trial writes nothing, but a step that writes a running mean and divides by it reads what it wrote.
    """
    recorded = getattr(_LOCAL, "recorded", None)
    value: Any = None if recorded is None else recorded.written.get(id(variable))
    graph: Any = None if value is None else tf.compat.v1.get_default_graph()
    while graph is not None and graph is not value.graph:  # What a branch wrote is known in the branch alone.
        graph = getattr(graph, "outer_graph", None)
    return None if graph is None else value
