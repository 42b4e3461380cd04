"""Sums over the replicas of one process that would wait for ever: refused while they are traced, or with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import collective_timeout
from tfdistkit.strategies.sync import step as steps


def sum_that_ends(reduce: Callable[[Any], Any], value: Any) -> Any:
    """Sums over several replicas of this process.

    Args:
        reduce: Sums a value over the replicas.
        value: This replica's tensors.

    Returns:
        What `reduce` returns.

    Raises:
        UnsupportedError: if the replicas would wait for each other for ever.
    """
    step = steps.current()
    if step is None or tf.executing_eagerly():
        return reduce(value)
    _require_sum_can_end(step)
    if not private_api.is_in_branch(step.graph):
        return reduce(value)
    context = tf.distribute.get_replica_context()
    replica = private_api.replica_id(context) - private_api.first_replica_id(context.strategy)
    return collective_timeout.in_branch(reduce, value, replica, len(context.strategy.extended.worker_devices))


def _require_sum_can_end(step: steps.ReplicaStep) -> None:
    if step.is_eager:
        raise UnsupportedError(
            explain(
                "A tf.function that replicas of one process run eagerly cannot sum over them: the first would wait "
                "for ever for the second, which runs after it.",
                received="an all-reduce (optimizer.apply, say) in a tf.function in an eager strategy.run",
                expected="strategy.run in the tf.function, or the tf.function itself given to strategy.run",
                do="Put the call of strategy.run into a tf.function.",
            )
        )
    if private_api.is_in_loop(step.graph):
        raise UnsupportedError(
            explain(
                "Replicas of one process cannot sum in a loop inside of the step: each has a loop of its own in "
                "the graph, and they would wait for each other for ever.",
                received="an all-reduce (optimizer.apply, say) in `for ... in tf.range(...)` or `tf.while_loop`",
                expected="the loop around strategy.run, or a Python loop (`range`), which is unrolled",
                do="Move the loop out of the function that is given to strategy.run.",
            )
        )
