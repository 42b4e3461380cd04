"""A trial step: a train step that is traced once more to look at its gradients, and applies none (`step_check`).

While it is traced, `optimizer.apply` records gradients in place of applying them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_LOCAL = threading.local()
_is_tracing = False


class CannotTryError(Exception):
    """A step cannot be traced on trial: what it computes would not be that of a real step."""


def is_tracing() -> bool:
    """Returns whether a trial step is being traced in this process."""
    return _is_tracing


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Marks its body as the trace of a trial step, whose replicas may run in other threads."""
    global _is_tracing
    _is_tracing = True
    try:
        yield
    finally:
        _is_tracing = False


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


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[Any, Any]]]:
    """Records the gradients of a replica in place of applying them.

    Yields:
        A list that receives each variable with this replica's part of its gradient, in the order of `apply`.
    """
    recorded: list[tuple[Any, Any]] = []
    _LOCAL.recorded = recorded
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
    recorded.extend(zip(variables, parts))
    return True
