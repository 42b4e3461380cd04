"""The strategy that this process made last: whose collectives are meant outside of `strategy.run`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

ExplainError = Callable[[Any], "Exception | None"]

# What is counted, each by itself.
KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "broadcast_object")


class CallCounts:
    """How often each kind of collective ran: the same number on every rank of a job that goes right.

    A TensorFlow variable, for it counts runs inside of graphs too. Made with the strategy and outside of its
    scope: one that a traced function made would be made only by the ranks that trace, and in a scope every
    new variable is a broadcast.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros([len(KINDS)], tf.int64), trainable=False, name="tfdistkit_calls")
            self._zero = tf.Variable(0, trainable=False, name="tfdistkit_zero")
            self._seen = tf.Variable(0.0, trainable=False, name="tfdistkit_seen")

    def next(self, kind: str) -> tf.Tensor:
        """Counts a call.

        Args:
            kind: One of `KINDS`.

        Returns:
            Its number among those of its kind, from 1.
        """
        with tf.device("CPU:0"):
            one = tf.one_hot(KINDS.index(kind), len(KINDS), dtype=tf.int64)
            return self._counts.assign_add(one, read_value=True)[KINDS.index(kind)]

    def take_back(self, kind: str) -> None:
        """Counts a call no longer, because it was not made after all.

        Args:
            kind: One of `KINDS`.
        """
        with tf.device("CPU:0"):
            self._counts.assign_sub(tf.one_hot(KINDS.index(kind), len(KINDS), dtype=tf.int64))

    def hide(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor that the graph that is being traced cannot take for a constant.

        Args:
            tensor: The tensor.
        """
        if tensor.shape.rank == 0:  # A reshape of a scalar is always a scalar, and would be seen through.
            return tensor + tf.cast(self._zero.read_value(), tensor.dtype)
        with tf.device("CPU:0"):
            shape = tf.shape(tensor) + self._zero.read_value()
        hidden = tf.reshape(tensor, shape)  # Without a copy.
        hidden.set_shape(tensor.shape)
        return hidden

    def keep(self, result: tf.Tensor) -> None:
        """Lets the graph that is being traced run what makes a tensor, even if nobody uses it.

        Args:
            result: The tensor. Something of it has to be used, or TensorFlow leaves out what makes it.
        """
        some = tf.reduce_sum(tf.cast(tf.reshape(result, [-1])[:1], tf.float32))
        with tf.device("CPU:0"):
            self._seen.assign(some, read_value=False)


@dataclass(frozen=True)
class Registration:
    """A strategy as the collectives know it.

    Args:
        strategy: The `tf.distribute.Strategy`.
        explain_error: Turns what TensorFlow raised into an error that names the lost worker, or into None.
        calls: Counts the collectives of this process; None in a job of one process.
    """

    strategy: Any
    explain_error: ExplainError | None
    calls: CallCounts | None


_last: Registration | None = None


def use(strategy: Any, explain_error: ExplainError | None = None) -> None:
    """Makes a strategy the one whose collectives are meant where none is in scope.

    Args:
        strategy: The `tf.distribute.Strategy` that was made.
        explain_error: Turns what TensorFlow raised into an error that names the lost worker, or into None.
    """
    global _last
    calls = CallCounts() if process_count(strategy) > 1 else None
    _last = Registration(strategy, explain_error, calls)


def last_made() -> Registration | None:
    """Returns the last strategy of this process; None when there was none."""
    return _last


def process_count(strategy: Any) -> int:
    """Returns how many processes a strategy spans."""
    return int(strategy.num_replicas_in_sync) // len(strategy.extended.worker_devices)
