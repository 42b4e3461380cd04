"""Ending workers: first asked, then, after a deadline that they share, killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from tfdistkit.launcher.backend import WorkerHandle

# How long a worker may take to end when asked: to write a checkpoint, to close files. Together with what it takes
# to see a failure (`status.SHUTDOWN_S`), less than the 10 seconds in which a job with a dead worker must be over.
GRACE_S = 5.0
# And when the job was told to end by who plans to end it, which gives it time for a last backup: Kubernetes and SLURM
# wait for 30 seconds before they kill. (`BackupAndResume` ends within 25 s of the signal.)
BACKUP_GRACE_S = 30.0
# A killed process is gone in milliseconds, or it hangs in the kernel and nobody can help.
_KILLED_S = 1.0
_POLL_S = 0.02


def stop_workers(
    workers: Sequence[WorkerHandle],
    number: int,
    should_stop: Callable[[], bool] = lambda: False,
    grace_s: float = GRACE_S,
) -> None:
    """Ends workers and everything they started.

    Args:
        workers: Those that have ended already are left alone, but not the processes that they left behind.
        number: The signal that asks them to end.
        should_stop: Whether to kill them now rather than wait for the deadline.
        grace_s: For how long to wait before they are killed, in seconds.
    """
    remaining = [worker for worker in workers if not worker.is_gone()]
    for worker in remaining:
        worker.send_signal(number)
        # A suspended process cannot act on a signal before it is woken up.
        worker.send_signal(signal.SIGCONT)
    for worker in (remaining := wait_for_end(remaining, grace_s, should_stop)):
        worker.send_signal(signal.SIGKILL)
    wait_for_end(remaining, _KILLED_S, lambda: False)


def wait_for_end(
    workers: Sequence[WorkerHandle], timeout_s: float, should_stop: Callable[[], bool]
) -> list[WorkerHandle]:
    """Waits until workers are gone, with everything that they started.

    Args:
        workers: The workers.
        timeout_s: For how long, in seconds.
        should_stop: Whether to stop waiting.

    Returns:
        Those that are still there.
    """
    deadline = time.monotonic() + timeout_s
    remaining = list(workers)
    while remaining and time.monotonic() < deadline and not should_stop():
        time.sleep(_POLL_S)
        remaining = [worker for worker in remaining if not worker.is_gone()]
    return remaining
