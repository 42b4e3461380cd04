"""How long a restart waits, and what is not started again because it would fail again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from tfdistkit.report.failures import Failure

# 1, 2, 4, ... seconds, a minute at most: long enough for a machine that is short of something, short enough to lose
# little of a job. Kubernetes waits 10 seconds to 5 minutes, torchrun not at all.
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0
# What went well for so long begins anew: its next failure has little to do with the last.
_SETTLED_S = 300.0
# What fails later than that after its start has done something before: loading TensorFlow takes less on a busy machine.
_AT_ONCE_S = 60.0
_POLL_S = 0.05

# Another time they may not come: a network, a disk, a service that is missing, memory that others use; TensorFlow's.
_PASSING = (
    "builtins.OSError",
    "builtins.MemoryError",
    "builtins.KeyboardInterrupt",
    "tensorflow.python.framework.errors_impl.OpError",
)
# EX_TEMPFAIL of sysexits.h: a script that ends with it asks to be started again.
_TRY_AGAIN_CODE = 75
# Where objects lie in memory differs from process to process.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class Backoff:
    """How long the next restart waits: longer each time, until nothing has failed for a while."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._last = time.monotonic()

    @property
    def wait_s(self) -> float:
        """How long the next restart is to wait, in seconds."""
        return float(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2.0 ** min(self._quick, 10)))

    def count(self) -> None:
        """Counts a restart."""
        self._in_a_row = self._quick + 1
        self._last = time.monotonic()

    @property
    def _quick(self) -> int:
        return self._in_a_row if time.monotonic() - self._last < _SETTLED_S else 0


def is_same_failure(before: Failure | None, now: Failure | None, lasted_s: float) -> bool:
    """Whether a failure is the one before once more, and would come again: it comes at once, in the same place.

    Args:
        before: The failure that a restart was the answer to.
        now: The failure after it.
        lasted_s: How long the restarted processes ran, in seconds.

    Returns:
        True if an exception has the same type, text and frames, no step was trained, and nothing but the script
        itself is in question: not for signals, refused connections, files that are missing, TensorFlow's errors.
    """
    if before is None or now is None or lasted_s > _AT_ONCE_S or not now.traceback:
        return False
    if now.exit_code == _TRY_AGAIN_CODE or any(kind in _PASSING for kind in now.kinds):
        return False
    return not now.steps and not now.is_consequence and _mark(before) == _mark(now)


def pause(seconds: float, is_over: Callable[[], bool]) -> None:
    """Waits.

    Args:
        seconds: For how long.
        is_over: Whether to stop waiting.
    """
    deadline = time.monotonic() + seconds
    while not is_over() and (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_S))


def first_of(failures: Sequence[Failure]) -> Failure | None:
    """Returns the first cause, None if nobody failed by itself."""
    return failures[0] if failures else None


def _mark(failure: Failure) -> tuple[object, ...]:
    """What makes a failure; which of the ranks was the quickest to fail is chance."""
    texts = (_ADDRESS.sub("", text) for text in (failure.message, failure.traceback))
    return failure.error_type, failure.exit_code, *texts
