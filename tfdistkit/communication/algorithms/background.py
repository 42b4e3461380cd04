"""Averages weights in the background while steps run, and lets all ranks end together."""

from __future__ import annotations

import atexit
import threading
import time
import weakref

import numpy as np

from tfdistkit.communication.reducer import Background

# The task of a step: hand over its weights, or add the result of an average.
SEND, APPLY = 1, 2

_EXIT_S = 2.0


class BackgroundAverage:
    """Runs the averages of one optimizer's weights, one at a time.

    A rank joins an average when the interval has passed, at the end of a step. It does not wait: the average ends when
    all ranks have joined. Where all ranks have to become equal, a rank joins one average after the other, each with a
    flag that it has no more steps, until all ranks have set the flag in the same average. So all ranks join the same
    averages, and no rank starts one that its peers never join.

    Args:
        name: Identifies the optimizer; the same on all ranks.
        every_s: Seconds from the end of an average to the next.
    """

    def __init__(self, name: str, every_s: float):
        self._name, self._every_s = name, every_s
        self._background: Background | None = None
        self._flight: _Flight | None = None
        self._since: float | None = None
        self._has_task, self._asking = False, threading.Lock()

    def use(self, background: Background) -> None:
        """Sets the object that sums over the ranks."""
        if self._background is None:
            self._background = background

    def poll(self, steps: np.ndarray) -> np.int64:
        """Returns the task of an update: `SEND`, `APPLY` or 0.

        An update gets none while another one has one: a step that updates twice may ask twice before it sends.

        Args:
            steps: The local steps since all ranks were equal; 0 before the first.

        Raises:
            Exception: the exception of the thread.
        """
        with self._asking:
            task = 0 if self._has_task or not steps else self._next_task()
            self._has_task = self._has_task or task != 0
        return np.int64(task)

    def _next_task(self) -> int:
        if self._flight is not None:
            return APPLY if self._flight.has_landed() else 0
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return SEND if now - self._since >= self._every_s else 0

    def send(self, rows: np.ndarray, *values: np.ndarray) -> np.bool_:
        """Begins an average of weights; returns at once.

        Args:
            rows: The number of rows that this rank has trained on since the last average.
            values: The weights.
        """
        self._begin(rows, list(values), has_ended=False)
        self._has_task = False
        return np.bool_(True)

    def take(self) -> list[np.ndarray]:
        """Returns what to add to the weights, after an average has ended."""
        assert self._flight is not None
        flight, self._flight = self._flight, None
        self._since = time.monotonic()
        self._has_task = False
        return flight.changes()

    def finish(self, rows: np.ndarray, *values: np.ndarray) -> list[np.ndarray]:
        """Joins averages until no rank has more steps; returns what to add to the weights.

        Args:
            rows: As for `send`.
            values: The weights.
        """
        changes = [np.zeros_like(value) for value in values]
        everyone_has_ended = False
        while not everyone_has_ended:
            if self._flight is None:
                self._begin(rows, [value + change for value, change in zip(values, changes)], has_ended=True)
                rows = np.zeros_like(rows)
            assert self._flight is not None
            self._flight.wait()
            everyone_has_ended = self._flight.everyone_has_ended
            changes = [change + more for change, more in zip(changes, self.take())]
        self._since = None
        return changes

    def _begin(self, rows: np.ndarray, values: list[np.ndarray], has_ended: bool) -> None:
        assert self._background is not None and self._flight is None
        self._flight = _Flight(self._background, self._name, float(rows), values, has_ended)


class _Flight:
    """One average in flight, in a thread of its own.

    Args:
        background: Sums over the ranks.
        name: See `BackgroundAverage`.
        rows: The weight of this rank.
        values: Its weights; not changed.
        has_ended: Whether it has no more steps.

    Attributes:
        everyone_has_ended: Whether no rank has more steps; known after the average has ended.
    """

    def __init__(self, background: Background, name: str, rows: float, values: list[np.ndarray], has_ended: bool):
        self._values = values
        self._sums: list[np.ndarray] = []
        self._background, self._rows = background, 0.0
        self._error: Exception | None = None
        self.everyone_has_ended = False
        # Summed over the ranks: rows, whether this rank has no more steps, and 1 to count the ranks.
        self._words = np.array([rows, has_ended, 1.0])
        self._thread = threading.Thread(target=self._run, args=(name,), name="tfdistkit-average", daemon=True)
        _flights.add(self)
        self._thread.start()

    def _run(self, name: str) -> None:
        try:
            # Of one dtype: they are summed in one operation.
            dtype = np.result_type(np.float32, *self._values)
            weighted = [np.multiply(value, self._words[0], dtype=dtype) for value in self._values]
            *self._sums, words = self._background.sum(name, [*weighted, self._words.astype(dtype)])
            self._rows, ended, ranks = (float(word) for word in words)
            self.everyone_has_ended = ended == ranks
        except Exception as error:
            self._error = error

    def has_landed(self) -> bool:
        """Returns whether it has ended; raises the error of the thread."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self) -> None:
        """Waits until it has ended.

        Raises:
            TimeoutError: if a rank does not join.
        """
        timeout_s = self._background.timeout_s
        self._thread.join(timeout_s)
        if not self.has_landed():  # The text is one that `peer_errors` recognizes.
            raise TimeoutError(f"Collective has timed out: no average within {timeout_s:g} seconds")

    def changes(self) -> list[np.ndarray]:
        """Returns the average minus the weights that this rank sent."""
        if not self._rows:
            return [np.zeros_like(value) for value in self._values]
        pairs = zip(self._sums, self._values)
        return [(total / self._rows).astype(value.dtype) - value for total, value in pairs]

    def abandon(self) -> None:
        """Ends the thread when the process exits, before the objects that it uses are destroyed."""
        if self._thread.is_alive():
            self._background.interrupt()
            self._thread.join(_EXIT_S)


_flights: weakref.WeakSet[_Flight] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for flight in list(_flights):
        flight.abandon()
