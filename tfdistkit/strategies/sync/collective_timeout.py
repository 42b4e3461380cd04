"""A deadline for collectives: so long a process waits in one for the other ranks.

TensorFlow's own (`timeout_seconds`) starts a thread with every collective, which sleeps until the deadline, also when
the collective has long ended: at 100 steps a second and 300 seconds tens of thousands, and then the process dies, for
it may have no more. Here two counters in the graph tell how many collectives have begun and ended, and one thread
looks at them.

Replicas of one process need it in branches alone: elsewhere all of them run the same graph.
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

from tfdistkit.keras_adapter import private_api

# Seconds between two looks, or less for a short deadline.
_EVERY_S = 1.0
_LOOKS = 10

# Seconds that a replica in a branch waits for another one of this process.
_BRANCH_TIMEOUT_S = 300.0

_PARTED = (
    "A sum over the replicas of this process has timed out. Received: after {:g} seconds, some replicas are in a "
    "branch (`tf.cond`, `if` on a tensor) with an all-reduce (optimizer.apply, say), and others went past it. "
    "Expected: a condition that is the same on all replicas, or no all-reduce in its branches.\n"
    "Make the condition from what all replicas have (a counter, a reduced value)."
)

_current: CollectiveDeadline | None = None
_of_branches: CollectiveDeadline | None = None


class CollectiveDeadline:
    """Ends the collectives of this process when one of them has waited for too long.

    Args:
        timeout_s: For how long. Collectives with another deadline keep TensorFlow's.
        says: What the error says.
        replicas: How many of this process count. Each has counters of its own: TensorFlow lets what writes one
            variable run in turn, so the first replica would keep the second out of the collective.
    """

    def __init__(self, timeout_s: float, says: str, replicas: int = 1):
        self.timeout_s, self._says = timeout_s, says
        with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
            # Where no graph is traced, and no strategy makes variables its own.
            counters = list(elsewhere.map(_make_counter, range(2 * replicas)))
        self._begun, self._ended = counters[:replicas], counters[replicas:]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tfdistkit-collective-deadline", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()
        atexit.register(self.close)  # Before TensorFlow goes.

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join(2 * _EVERY_S)

    @property
    def replicas(self) -> int:
        """How many replicas count."""
        return len(self._begun)

    def begin(self, tensor: Any, replica: int = 0) -> None:
        """Counts a collective that begins when its input is there."""
        _count(self._begun[replica], tensor)

    def end(self, tensor: Any, replica: int = 0) -> None:
        """Counts a collective that ends when its output is there."""
        _count(self._ended[replica], tensor)

    def _watch(self) -> None:
        since, seen = time.monotonic(), -1
        while not self._closed.wait(min(_EVERY_S, self.timeout_s / _LOOKS)):
            begun, ended = (sum(int(one.numpy()) for one in counters) for counters in (self._begun, self._ended))
            # A step that failed may have begun what never ends; then no thread waits in TensorFlow.
            if begun <= ended or ended != seen or not _waits_in_tensorflow():
                since, seen = time.monotonic(), ended
            elif time.monotonic() - since > self.timeout_s:
                private_api.abort_collectives(self._says)
                return


def start(timeout_s: float) -> None:
    """Gives the collectives of this process a deadline, those whose `timeout_seconds` is the same.

    Args:
        timeout_s: Seconds.
    """
    global _current
    says = f"Collective has timed out: the others did not join it within {timeout_s:g} seconds"
    _current = CollectiveDeadline(timeout_s, says)
    _current.start()


def leave_to_tensorflow() -> None:
    """From now on collectives keep TensorFlow's own deadline: XLA cannot compile counters of the host."""
    global _current
    _current = None


def around(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of TensorFlow's collective operations."""
    deadline = _current
    if deadline is None or kwargs.get("timeout") != deadline.timeout_s:
        return original(t, *args, **kwargs)
    t = tf.convert_to_tensor(t)
    deadline.begin(t)
    result = original(t, *args, **{**kwargs, "timeout": 0})
    deadline.end(result)
    return result


def in_branch(collective: Callable[[Any], Any], value: Any, replica: int, replicas: int) -> Any:
    """Runs a collective in a branch of the graph (`tf.cond`, an `if` on a tensor), where replicas may part.

    Args:
        collective: Takes `value` and returns what comes of it.
        value: Nested tensors.
        replica: Which replica of this process runs it.
        replicas: How many this process has.
    """
    global _of_branches
    if _of_branches is None or _of_branches.replicas < replicas:
        _of_branches = CollectiveDeadline(_BRANCH_TIMEOUT_S, _PARTED.format(_BRANCH_TIMEOUT_S), replicas)
        _of_branches.start()
    value = tf.nest.map_structure(tf.convert_to_tensor, value)
    _of_branches.begin(tf.nest.flatten(value)[0], replica)
    result = collective(value)
    _of_branches.end(tf.nest.flatten(result)[0], replica)
    return result


def _make_counter(_: int) -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(0, dtype=tf.int64, trainable=False)


def _count(counter: tf.Variable, after: Any) -> None:
    with tf.control_dependencies([after]), tf.device(counter.handle.device):
        # The raw operation: no strategy, gradient tape or function has to know of the counter.
        tf.raw_ops.AssignAddVariableOp(resource=counter.handle, value=tf.constant(1, tf.int64))


def _waits_in_tensorflow() -> bool:
    own = threading.get_ident()
    frames = [frame for thread, frame in sys._current_frames().items() if thread != own]
    return any(str(frame.f_globals.get("__name__")).startswith("tensorflow.") for frame in frames)
