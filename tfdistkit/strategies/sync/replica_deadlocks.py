"""Refuses sums over the replicas of one process that would deadlock, or gives them a timeout in a branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import collective_timeout
from tfdistkit.strategies.sync import step as steps


def sum_without_deadlock(reduce: Callable[[Any], Any], value: Any) -> Any:
    """Sums over several replicas of this process; refuses sums that would deadlock.

    Args:
        reduce: Sums a value over the replicas.
        value: This replica's tensors.

    Returns:
        The result of `reduce`.

    Raises:
        UnsupportedError: if the replicas would deadlock.
    """
    step = steps.current()
    if step is None or tf.executing_eagerly():
        return reduce(value)
    _require_no_deadlock(step)
    if not private_api.is_in_branch(step.graph):
        return reduce(value)
    context = tf.distribute.get_replica_context()
    replica = private_api.replica_id(context) - private_api.first_replica_id(context.strategy)
    return collective_timeout.in_branch(reduce, value, replica, len(context.strategy.extended.worker_devices))


def _require_no_deadlock(step: steps.ReplicaStep) -> None:
    if step.is_eager:
        raise UnsupportedError(
            explain(
                "Replicas of one process must not all-reduce in a tf.function that they call eagerly: the first would "
                "deadlock, because the second runs after it.",
                received="an all-reduce (such as optimizer.apply) in a tf.function in an eager strategy.run",
                expected="strategy.run in the tf.function, or the tf.function itself given to strategy.run",
                do="Put the call of strategy.run into a tf.function.",
            )
        )
    if private_api.is_in_loop(step.graph):
        raise UnsupportedError(
            explain(
                "Replicas of one process must not all-reduce in a loop inside of the step: each has its own loop in "
                "the graph, and they would deadlock.",
                received="an all-reduce (such as optimizer.apply) in `for ... in tf.range(...)` or `tf.while_loop`",
                expected="the loop around strategy.run, or a Python loop (`range`), which is unrolled",
                do="Move the loop out of the function that is given to strategy.run.",
            )
        )
