"""Restart policy: the delay before a restart, and the failures that a restart would repeat."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence

from tfdistkit.report.failures import Failure

# Exponential backoff: 1, 2, 4, ... seconds, at most a minute. Kubernetes waits 10 seconds to 5 minutes, torchrun not at
# all. Up to a quarter more by chance, so that jobs that failed together do not hit a file server together.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
_JITTER = 0.25
# After this time without a failure, the backoff starts anew.
_SETTLED_S = 300.0
# A failure later than this after the start is not immediate: loading TensorFlow takes less, even on a busy machine.
_AT_ONCE_S = 60.0
# Failures in a row after the same step of which the last has made no progress.
_IN_A_ROW = 3
_POLL_S = 0.05

# Transient errors that a restart may avoid: network, disk, a missing service, memory; all TensorFlow errors.
_PASSING = (
    "builtins.OSError",
    "builtins.MemoryError",
    "builtins.KeyboardInterrupt",
    "tensorflow.python.framework.errors_impl.OpError",
)
# EX_TEMPFAIL of sysexits.h: a script that ends with it asks to be started again.
_TRY_AGAIN_CODE = 75
# Memory addresses of objects differ between processes.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Backoff:
    """The delay before the next restart: grows with each restart, and resets after a time without failures."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last = time.monotonic()
        self._factor = _drawn()

    @property
    def wait_s(self) -> float:
        """The delay before the next restart, in seconds."""
        return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self._quick, 10))) * self._factor

    def count(self) -> None:
        """Counts a restart."""
        self._in_a_row = self._quick + 1
        self._last = time.monotonic()
        self._factor = _drawn()

    @property
    def _quick(self) -> int:
        return self._in_a_row if time.monotonic() - self._last < _SETTLED_S else 0


def _drawn() -> float:
    # Not from the generator that the user's script of a notebook may have seeded.
    return 1.0 + _JITTER * random.SystemRandom().random()


class Repeats:
    """The failures of attempts in a row that only repeat each other."""

    def __init__(self) -> None:
        self._last: Failure | None = None
        self.in_a_row = 0

    def give_up(self, now: Failure | None, lasted_s: float) -> bool:
        """Counts the failure of an attempt; returns whether another attempt would only repeat it.

        Args:
            now: The failure; None if no process failed on its own.
            lasted_s: How long the attempt ran, in seconds.

        Returns:
            True if two attempts in a row failed alike before a step was trained; or three after the same step, which
            have made no progress: the second one may have begun at a backup that the first one had made.
        """
        before, self._last = self._last, now
        if not _is_alike(before, now):
            self.in_a_row = 0 if now is None else 1
            return False
        self.in_a_row += 1
        assert now is not None
        return self.in_a_row >= _IN_A_ROW if now.steps else lasted_s <= _AT_ONCE_S


def is_same_failure(before: Failure | None, now: Failure | None, lasted_s: float) -> bool:
    """Returns whether a failure immediately repeats the previous one, so that a restart would fail again.

    Args:
        before: The failure before the restart.
        now: The failure after it.
        lasted_s: How long the restarted process ran, in seconds.

    Returns:
        True if an exception has the same type, text and frames, and no step was trained; False for causes outside of
        the script: signals, refused connections, missing files, TensorFlow's errors.
    """
    return _is_alike(before, now) and lasted_s <= _AT_ONCE_S and now is not None and not now.steps


def _is_alike(before: Failure | None, now: Failure | None) -> bool:
    """Whether two failures have the same cause in the script, after the same step."""
    if before is None or now is None or not now.traceback or now.is_consequence:
        return False
    if now.exit_code == _TRY_AGAIN_CODE or any(kind in _PASSING for kind in now.kinds):
        return False
    return (before.steps or 0) == (now.steps or 0) and _mark(before) == _mark(now)


def pause(seconds: float, is_over: Callable[[], bool]) -> None:
    """Sleeps until a deadline or a condition.

    Args:
        seconds: The maximum wait.
        is_over: Whether to stop waiting.
    """
    deadline = time.monotonic() + seconds
    while not is_over() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_S))


def first_of(failures: Sequence[Failure]) -> Failure | None:
    """Returns the first cause; None if no process failed on its own."""
    return failures[0] if failures else None


def _mark(failure: Failure) -> tuple[object, ...]:
    """Returns the identity of a failure; its rank is left out, as any rank may fail first."""
    texts = (_ADDRESS.sub("", text) for text in (failure.message, failure.traceback))
    return failure.error_type, failure.exit_code, *texts
