"""Records the last strategy of this process: the default for collectives outside of any scope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

ExplainError = Callable[[Any], "Exception | None"]

# Kinds of collectives, each with a count.
KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all", "broadcast_object")


class SumCalls:
    """Notes that code of the user's summed tensors over the ranks, in Python: in a graph, when it is traced."""

    def __init__(self) -> None:
        self._called = False

    def note(self) -> None:
        """Notes a call."""
        self._called = True

    def were_called(self) -> bool:
        """Returns whether there was a call since the last question."""
        called, self._called = self._called, False
        return called


sums = SumCalls()


class CallCounts:
    """Counts how often each kind of collective ran; the counts are equal on all ranks of a correct job.

    The counts are TensorFlow variables, so they count runs inside of graphs too. They are made with the strategy and
    outside of its scope: a traced function would make them only on ranks that trace, and in a scope every new
    variable is a broadcast.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._counts = tf.Variable(tf.zeros([len(KINDS)], tf.int64), trainable=False, name="tfdistkit_calls")
            self._zero = tf.Variable(0, trainable=False, name="tfdistkit_zero")
            self._kept = tf.Variable(0.0, trainable=False, name="tfdistkit_kept")

    def next(self, kind: str) -> tf.Tensor:
        """Counts a call.

        Args:
            kind: One of `KINDS`.

        Returns:
            The number of the call among those of its kind, from 1.
        """
        with tf.device("CPU:0"):
            one = tf.one_hot(KINDS.index(kind), len(KINDS), dtype=tf.int64)
            return self._counts.assign_add(one, read_value=True)[KINDS.index(kind)]

    def take_back(self, kind: str) -> None:
        """Undoes the count of a call that was not made after all.

        Args:
            kind: One of `KINDS`.
        """
        with tf.device("CPU:0"):
            self._counts.assign_sub(tf.one_hot(KINDS.index(kind), len(KINDS), dtype=tf.int64))

    def hide(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor that the traced graph cannot fold as a constant.

        Args:
            tensor: The tensor.
        """
        if tensor.shape.rank == 0:  # TensorFlow would fold the reshape of a scalar.
            return tensor + tf.cast(self._zero.read_value(), tensor.dtype)
        if tensor.shape.rank == 1:  # Also that of a vector, whose only dimension it infers.
            with tf.device("CPU:0"):
                begin = tf.reshape(self._zero.read_value(), [1])
            hidden = tf.slice(tensor, begin, [-1])
        else:
            with tf.device("CPU:0"):
                shape = tf.shape(tensor) + self._zero.read_value()
            hidden = tf.reshape(tensor, shape)  # Does not copy.
        hidden.set_shape(tensor.shape)
        return hidden

    def keep(self, result: tf.Tensor) -> None:
        """Keeps TensorFlow from pruning the operation behind a tensor in the traced graph, even if it is unused.

        Args:
            result: The tensor; an element of it is assigned to a variable.
        """
        some = tf.reduce_sum(tf.cast(tf.reshape(result, [-1])[:1], tf.float32))
        with tf.device("CPU:0"):
            self._kept.assign(some, read_value=False)


@dataclass(frozen=True)
class Registration:
    """A strategy registered for collectives.

    Args:
        strategy: The `tf.distribute.Strategy`.
        explain_error: Converts an error of TensorFlow to one that names the lost worker, or to None.
        calls: Counts the collectives of this process; None in a job of one process.
    """

    strategy: Any
    explain_error: ExplainError | None
    calls: CallCounts | None


_last: Registration | None = None


def use(strategy: Any, explain_error: ExplainError | None = None) -> None:
    """Sets the default strategy for collectives called outside any scope.

    Args:
        strategy: The `tf.distribute.Strategy`.
        explain_error: Converts an error of TensorFlow to one that names the lost worker, or to None.
    """
    global _last
    calls = CallCounts() if process_count(strategy) > 1 else None
    _last = Registration(strategy, explain_error, calls)


def last_made() -> Registration | None:
    """Returns the last strategy of this process; None before the first one."""
    return _last


def process_count(strategy: Any) -> int:
    """Returns the number of processes of a strategy."""
    return int(strategy.num_replicas_in_sync) // len(strategy.extended.worker_devices)
