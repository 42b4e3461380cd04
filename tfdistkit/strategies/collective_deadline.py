"""A deadline for collectives: so long a process waits in one for the other ranks.

TensorFlow's own (`timeout_seconds`) starts a thread with every collective, which sleeps until the deadline, also when
the collective has long ended: at 100 steps a second and 300 seconds tens of thousands, and then the process dies, for
it may have no more. Here two counters in the graph tell how many collectives have begun and ended, and one thread
looks at them.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import Any

import tensorflow as tf

from tfdistkit.strategies import keras_seams

# Seconds between two looks, or less for a short deadline.
_EVERY_S = 1.0
_LOOKS = 10

_current: CollectiveDeadline | None = None


class CollectiveDeadline:
    """Ends the collectives of this process when one of them has waited for too long.

    Args:
        timeout_s: For how long. Collectives with another deadline keep TensorFlow's.
    """

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        with tf.init_scope(), tf.device("CPU:0"):
            self._begun, self._ended = (tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2))
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

    def begin(self, tensor: Any) -> None:
        """Counts a collective that begins when its input is there."""
        _count(self._begun, tensor)

    def end(self, tensor: Any) -> None:
        """Counts a collective that ends when its output is there."""
        _count(self._ended, tensor)

    def _watch(self) -> None:
        since, seen = time.monotonic(), -1
        while not self._closed.wait(min(_EVERY_S, self.timeout_s / _LOOKS)):
            begun, ended = int(self._begun.numpy()), int(self._ended.numpy())
            # A step that failed may have begun what never ends; then no thread waits in TensorFlow.
            if begun <= ended or ended != seen or not _waits_in_tensorflow():
                since, seen = time.monotonic(), ended
            elif time.monotonic() - since > self.timeout_s:
                keras_seams.abort_collectives(
                    f"Collective has timed out: the others did not join it within {self.timeout_s:g} seconds"
                )
                return


def start(timeout_s: float) -> None:
    """Gives the collectives of this process a deadline, those whose `timeout_seconds` is the same.

    Args:
        timeout_s: Seconds.
    """
    global _current
    _current = CollectiveDeadline(timeout_s)
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


def _count(counter: tf.Variable, after: Any) -> None:
    with tf.control_dependencies([after]), tf.device(counter.handle.device):
        # The raw operation: no strategy, gradient tape or function has to know of the counter.
        tf.raw_ops.AssignAddVariableOp(resource=counter.handle, value=tf.constant(1, tf.int64))


def _waits_in_tensorflow() -> bool:
    own = threading.get_ident()
    frames = [frame for thread, frame in sys._current_frames().items() if thread != own]
    return any(str(frame.f_globals.get("__name__")).startswith("tensorflow.") for frame in frames)
