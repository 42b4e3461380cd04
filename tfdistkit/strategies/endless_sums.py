"""Sums over the replicas of one process that would wait for ever, refused while they are traced."""

from __future__ import annotations

import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.strategies import keras_seams
from tfdistkit.strategies.step import ReplicaStep


def require_sum_can_end(step: ReplicaStep | None) -> None:
    """Checks where a sum over several replicas of this process stands.

    Args:
        step: The step that the replica runs.

    Raises:
        UnsupportedError: if the replicas would wait for each other for ever.
    """
    if step is None or tf.executing_eagerly():
        return
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
    if keras_seams.is_in_loop(step.graph):
        raise UnsupportedError(
            explain(
                "Replicas of one process cannot sum in a loop inside of the step: each has a loop of its own in "
                "the graph, and they would wait for each other for ever.",
                received="an all-reduce (optimizer.apply, say) in `for ... in tf.range(...)` or `tf.while_loop`",
                expected="the loop around strategy.run, or a Python loop (`range`), which is unrolled",
                do="Move the loop out of the function that is given to strategy.run.",
            )
        )
