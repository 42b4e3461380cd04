"""Collective timeout: how long a process waits in a collective for its peers.

TensorFlow's own (`timeout_seconds`) starts a thread for every collective, which sleeps until the deadline even if the
collective has ended long before: 100 steps a second with 300 seconds need tens of thousands of threads, and the process
dies at its limit. Here two counters in the graph hold how many collectives have begun and ended, and one thread polls
them.

Replicas of one process need it only in branches: elsewhere all of them run the same graph.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_collectives
from tfdistkit.report.hangs import notes
from tfdistkit.strategies.sync.gradients import trial

# Poll interval in seconds, that of samples of the notes; a timeout below 10 of them is divided into 10 polls.
_POLL_EVERY_S = 0.25
_POLLS = 10
# Time for the thread to end, in seconds.
_END_S = 2.0

# Seconds that a replica in a branch waits for another replica of this process.
_BRANCH_TIMEOUT_S = 300.0

_DIVERGED = (
    "All replicas of this process must take the same branch: a sum over them has timed out. Received: after {:g} "
    "seconds, some replicas are in a branch (`tf.cond`, `if` on a tensor) with an all-reduce (such as "
    "optimizer.apply), and others took another one. "
    "Expected: a condition that is the same on all replicas, or no all-reduce in its branches.\n"
    "Compute the condition from values that are equal on all replicas (a counter, a reduced value)."
)

_current: CollectiveDeadline | None = None
_of_branches: CollectiveDeadline | None = None


class CollectiveDeadline:
    """Aborts the collectives of this process when one of them exceeds the timeout.

    Args:
        timeout_s: The timeout in seconds. Collectives with another timeout use TensorFlow's own.
        message: The text of the error.
        replicas: How many replicas of this process count. Each has its own counters: TensorFlow serializes writes
            to a variable, so with shared counters the first replica would keep the second out of the collective.
    """

    def __init__(self, timeout_s: float, message: str, replicas: int = 1):
        self.timeout_s, self._message = timeout_s, message
        with concurrent.futures.ThreadPoolExecutor(1) as other_thread:
            # In a thread without a graph that is being traced, and without a strategy's scope.
            counters = list(other_thread.map(_make_counter, range(2 * replicas)))
        self._begun, self._ended = counters[:replicas], counters[replicas:]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfdistkit-collective-deadline", daemon=True)

    def start(self) -> None:
        """Starts the polling thread."""
        self._thread.start()
        atexit.register(self.close)  # Before TensorFlow shuts down.

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join(_END_S)

    @property
    def replicas(self) -> int:
        """The number of replicas that count."""
        return len(self._begun)

    def begin(self, tensor: Any, replica: int = 0) -> None:
        """Counts a collective as begun when its input is available."""
        _count(self._begun[replica], tensor)

    def end(self, tensor: Any, replica: int = 0) -> None:
        """Counts a collective as ended when its output is available."""
        _count(self._ended[replica], tensor)

    def _watch(self) -> None:
        since, last_ended = time.monotonic(), -1
        while not self._closed.wait(min(_POLL_EVERY_S, self.timeout_s / _POLLS)):
            begun, ended = (sum(int(one.numpy()) for one in counters) for counters in (self._begun, self._ended))
            if self is _current:
                notes.own.note_ring(begun, ended)
            # A failed step may leave a collective begun but not ended; then no thread waits in TensorFlow.
            if begun <= ended or ended != last_ended or not _waits_in_tensorflow():
                since, last_ended = time.monotonic(), ended
            elif time.monotonic() - since > self.timeout_s:
                private_collectives.abort_collectives(self._message)
                return


def start(timeout_s: float) -> None:
    """Sets the timeout for collectives of this process whose `timeout_seconds` is the same.

    Args:
        timeout_s: Seconds.
    """
    global _current
    message = f"Collective has timed out: the others did not join it within {timeout_s:g} seconds"
    _current = CollectiveDeadline(timeout_s, message)
    _current.start()


def leave_to_tensorflow() -> None:
    """Switches collectives to TensorFlow's own timeout: XLA cannot compile counters on the host."""
    global _current
    _current = None


def around(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of TensorFlow's collective operations."""
    if trial.is_tracing():  # It writes no variables, such as the counters.
        return trial.in_order(lambda: original(t, *args, **kwargs))
    deadline = _current
    if deadline is None or kwargs.get("timeout") != deadline.timeout_s:
        return original(t, *args, **kwargs)
    t = tf.convert_to_tensor(t)
    deadline.begin(t)
    result = original(t, *args, **{**kwargs, "timeout": 0})
    deadline.end(result)
    return result


def in_branch(collective: Callable[[Any], Any], value: Any, replica: int, replicas: int) -> Any:
    """Runs a collective with a timeout in a branch of the graph (`tf.cond`, an `if` on a tensor).

    Args:
        collective: Takes `value` and returns the reduced value.
        value: Nested tensors and IndexedSlices.
        replica: The replica of this process that runs it.
        replicas: The number of replicas of this process.
    """
    global _of_branches
    if _of_branches is None or _of_branches.replicas < replicas:
        _of_branches = CollectiveDeadline(_BRANCH_TIMEOUT_S, _DIVERGED.format(_BRANCH_TIMEOUT_S), replicas)
        _of_branches.start()
    # IndexedSlices stay what they are.
    value = tf.nest.map_structure(tf.convert_to_tensor, value, expand_composites=True)
    _of_branches.begin(tf.nest.flatten(value, expand_composites=True)[0], replica)
    result = collective(value)
    _of_branches.end(tf.nest.flatten(result, expand_composites=True)[0], replica)
    return result


def _make_counter(_: int) -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


def _count(counter: tf.Variable, after: Any) -> None:
    with tf.control_dependencies([after]), tf.device(counter.handle.device):
        # The raw operation, which no strategy, gradient tape or function tracks.
        tf.raw_ops.AssignAddVariableOp(resource=counter.handle, value=tf.constant(1, tf.int64))


def _waits_in_tensorflow() -> bool:
    own = threading.get_ident()
    frames = [frame for thread, frame in sys._current_frames().items() if thread != own]
    return any(str(frame.f_globals.get("__name__")).startswith("tensorflow.") for frame in frames)
