"""Steps in flight, whose results are fetched while the worker already runs its next step.

TensorFlow's thread for a worker fetches the result of a step before it schedules the next one, and meanwhile the worker
is idle. Here a separate thread fetches it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from tfdistkit.keras_adapter import private_api

# Set when a step may have ended. A thread that waits for steps clears it, checks them, and waits for it.
step_ended = threading.Event()

# Lost results of a step before the cause must be another one than the loss of a worker.
_MOST_LOSSES = 3

_LOCAL = threading.local()


class InflightStep:
    """A step in flight.

    It keeps its arguments, to schedule the step again if the result is lost with its worker. This also keeps
    TensorFlow's thread for the worker from freeing them, which takes longer than its other work between two steps.

    Args:
        schedule: Schedules a step on a worker, `schedule(step, args)`, and returns its `RemoteValue`.
        step: The `tf.function`, or one of its concrete functions.
        args: Its arguments.
    """

    def __init__(self, schedule: Callable[[Any, tuple], Any], step: Any, args: tuple):
        self._schedule, self._step, self._args = schedule, step, args
        self._losses = 0
        self._start()

    def _start(self) -> None:
        self._value = self._schedule(self._step, self._args)
        # By now the step may have ended, and TensorFlow's thread may have fetched the result.
        self._value.tfdistkit_lost = None

    def has_ended(self) -> bool:
        """Returns whether the step has ended or failed, and its result is in this process, or lost.

        TensorFlow reports it as ready earlier; to fetch it then would hang if the worker is stopped.
        """
        return self._value.tfdistkit_lost is not None or private_api.has_ended(self._value)

    def result(self) -> Any:
        """Returns the result; None if it was lost with its worker, and the step was scheduled again.

        Raises:
            Exception: the error of the step, or of the fetch after repeated losses.
        """
        lost = self._value.tfdistkit_lost
        if lost is None:
            return self._value.get()
        self._losses += 1
        if self._losses > _MOST_LOSSES:
            raise lost
        self._start()
        return None


def fetch_aside(original: Callable[[Any], Any], value: Any) -> Any:
    """Hook of `RemoteValue.get`: fetches a result in another thread than TensorFlow's thread for the worker."""
    if not hasattr(value, "tfdistkit_lost") or private_api.has_ended(value):
        try:
            return original(value)
        finally:
            step_ended.set()
    if not hasattr(_LOCAL, "results"):
        # One queue for each worker: the results of a stopped worker do not arrive.
        _LOCAL.results = queue.SimpleQueue()
        threading.Thread(target=_fetch, args=(original, _LOCAL.results), name="Results", daemon=True).start()
    _LOCAL.results.put(value)
    return None


def _fetch(original: Callable[[Any], Any], results: queue.SimpleQueue[Any]) -> None:
    private_api.wait_for_own_operations_only()
    while True:
        value = results.get()
        try:
            original(value)
        except Exception as error:
            value.tfdistkit_lost = error
        finally:
            step_ended.set()
        del value  # Otherwise it is kept until the next result.
