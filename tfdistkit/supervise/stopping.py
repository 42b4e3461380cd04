"""Stop workers: send a signal, wait until a shared deadline, then kill."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from tfdistkit.launcher.backend import WorkerHandle

# Time for a worker to write a checkpoint and close files after a signal. Together with the time to detect a failure
# (`status.SHUTDOWN_S`), less than the 10 seconds in which a job with a dead worker must end.
GRACE_S = 5.0
# The same after a scheduler's signal, with time for a last backup: Kubernetes and SLURM wait 30 seconds before they
# kill. (`BackupAndResume` ends within 25 s of the signal.)
BACKUP_GRACE_S = 30.0
# A killed process ends in milliseconds, unless it hangs in the kernel.
_KILLED_S = 1.0
_POLL_S = 0.02


def stop_workers(
    workers: Sequence[WorkerHandle],
    number: int,
    should_stop: Callable[[], bool] = lambda: False,
    grace_s: float = GRACE_S,
) -> list[WorkerHandle]:
    """Stops workers and all processes that they started.

    Args:
        workers: The workers; of those that have ended, the remaining child processes are stopped.
        number: The signal that asks them to end.
        should_stop: Whether to kill them now instead of waiting for the deadline.
        grace_s: The time before they are killed, in seconds.

    Returns:
        The workers that did not end after SIGKILL: they hang in the kernel.
    """
    remaining = [worker for worker in workers if not worker.is_gone()]
    for worker in remaining:
        worker.send_signal(number)
        # A suspended process handles a signal only after SIGCONT.
        worker.send_signal(signal.SIGCONT)
    for worker in (remaining := wait_for_end(remaining, grace_s, should_stop)):
        worker.send_signal(signal.SIGKILL)
    return wait_for_end(remaining, _KILLED_S, lambda: False)


def wait_for_end(
    workers: Sequence[WorkerHandle], timeout_s: float, should_stop: Callable[[], bool]
) -> list[WorkerHandle]:
    """Waits until workers and all processes that they started have ended.

    Args:
        workers: The workers.
        timeout_s: The maximum wait, in seconds.
        should_stop: Whether to stop waiting.

    Returns:
        The workers that have not ended.
    """
    deadline = time.monotonic() + timeout_s
    remaining = list(workers)
    while remaining and time.monotonic() < deadline and not should_stop():
        time.sleep(_POLL_S)
        remaining = [worker for worker in remaining if not worker.is_gone()]
    return remaining
