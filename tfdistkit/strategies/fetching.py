"""Fetches results from workers without ever waiting in vain."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Fetcher:
    """Fetches in a thread of its own.

    A step has ended, but its result still has to come over the network. TensorFlow waits for it without end where the
    worker is cut off just then; the thread that waits is left behind, and another one takes its place.
    """

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[Any] | None = None

    def fetch(self, get: Callable[[], Any], look: Callable[[], None], every_s: float) -> Any:
        """Returns what `get` returns, or raises what it raises.

        Args:
            get: Called in the thread.
            look: Called now and then; an error that it raises ends the waiting.
            every_s: Seconds between two calls of `look`.
        """
        if self._wanted is None:
            self._wanted = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._wanted,), name="tfdistkit-fetcher", daemon=True).start()
        answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._wanted.put((get, answer))
        while True:
            try:
                value, error = answer.get(timeout=every_s)
                break
            except queue.Empty:
                try:
                    look()
                except BaseException:
                    self.close()
                    raise
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """Lets the thread end, when it can."""
        if self._wanted is not None:
            self._wanted.put(None)
            self._wanted = None


def _serve(wanted: queue.SimpleQueue[Any]) -> None:
    while (one := wanted.get()) is not None:
        get, answer = one
        try:
            answer.put((get(), None))
        except BaseException as error:  # noqa: B036  (raised where it was asked for)
            answer.put((None, error))
        del one, get, answer  # Nothing of a step is kept until the next one.
