"""Steps on their way to the workers, whose results are fetched while a worker runs its next step already.

TensorFlow's thread for a worker fetches what a step returned before it gives the worker the next one, and so long the
worker has nothing to do. Here a thread of our own fetches it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from tfdistkit.keras_adapter import private_api

# Set when a step may have ended. Whoever waits for steps clears it, looks at them, and waits for it.
step_ended = threading.Event()

# How often the result of a step may get lost before there must be another reason than a worker that died.
_MOST_LOSSES = 3

_LOCAL = threading.local()


class SentStep:
    """A step on its way to a worker, or back.

    It keeps its arguments: a worker that dies may take the result with it. And to free them takes longer than all that
    TensorFlow's thread for a worker does between two steps; so it is not the last one that holds them.

    Args:
        schedule: What hands a step to a worker, `schedule(step, args)`, and returns its `RemoteValue`.
        step: The `tf.function`, or one of its concrete functions.
        args: Its arguments.
    """

    def __init__(self, schedule: Callable[[Any, tuple], Any], step: Any, args: tuple):
        self._schedule, self._step, self._args = schedule, step, args
        self._losses = 0
        self._send()

    def _send(self) -> None:
        self._value = self._schedule(self._step, self._args)
        # The step may have ended by now, and TensorFlow's thread have fetched the result.
        self._value.tfdistkit_lost = None

    def has_ended(self) -> bool:
        """Whether it has ended, well or not, and what it returned is in this process, or lost.

        TensorFlow calls it ready before; to ask for it then would wait, without end, for a worker that is stopped.
        """
        return self._value.tfdistkit_lost is not None or private_api.has_ended(self._value)

    def result(self) -> Any:
        """Returns what it returned; None if that was lost with its worker, and the step is on its way again.

        Raises:
            Exception: what it raised, or what keeps its result from coming.
        """
        lost = self._value.tfdistkit_lost
        if lost is None:
            return self._value.get()
        self._losses += 1
        if self._losses > _MOST_LOSSES:
            raise lost
        self._send()
        return None


def fetch_aside(original: Callable[[Any], Any], value: Any) -> Any:
    """Hook of `RemoteValue.get`, by which TensorFlow's thread for a worker fetches the result of a step."""
    if not hasattr(value, "tfdistkit_lost") or private_api.has_ended(value):
        try:
            return original(value)
        finally:
            step_ended.set()
    if not hasattr(_LOCAL, "results"):
        # One for each worker: the results of one that is stopped do not come.
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
        del value  # Or it would be kept until the next one comes.
