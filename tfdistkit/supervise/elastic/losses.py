"""Tells lost workers of a failed attempt from failures of the script."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from tfdistkit.report.failures import Failure
from tfdistkit.report.names import ProcessName
from tfdistkit.supervise.result import JobResult

# Of a worker that a scheduler or the system ended; other signals may be consequences of the first loss (an abort).
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM")
# The signal that requests a change: a worker that ends by it has made its backup.
ASKING = signal.SIGUSR1


def lost_workers(result: JobResult) -> tuple[ProcessName, ...]:
    """Returns the workers that were lost: killed by a signal, with their host, or suspended for too long.

    Args:
        result: The result of a failed attempt.

    Returns:
        Their names; empty if the first failure is an exception or an exit code, which are failures of the script.
    """
    first = result.failures[0] if result.failures else None
    if first is None or first.is_consequence:
        return result.suspended
    if not _is_lost(first):
        return ()
    return (first.name, *(one.name for one in result.failures[1:] if one.loss or one.signal in _FROM_OUTSIDE))


def asked_itself(result: JobResult) -> bool:
    """Returns whether a worker got the signal that asks for a change from elsewhere, and ended after its backup."""
    return bool(result.failures) and result.failures[0].signal == signal.Signals(ASKING).name


def unreachable_hosts(failures: Sequence[Failure]) -> frozenset[int]:
    """Returns the ranks that were lost with their host."""
    return frozenset(one.rank for one in failures if one.loss)


def _is_lost(failure: Failure) -> bool:
    return bool(failure.loss) or failure.signal is not None
