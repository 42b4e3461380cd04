"""What to do about what is seen: one pure function, so every case can be tested without a process."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from tfdistkit.supervise.status import GroupStatus, WorkerStatus

# A worker with an unhandled exception may take this long to shut its interpreter down. TensorFlow can hang there,
# waiting for its peers, and these can wait for the worker: then nobody would ever end.
SHUTDOWN_S = 3.0


class Action(enum.Enum):
    """What the supervisor does next."""

    WAIT = "wait"
    FINISH = "finish"
    STOP = "stop"


class Outcome(enum.Enum):
    """How a job came out."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Decision:
    """What to do.

    Args:
        action: The next step.
        outcome: How the job came out, when this ends it.
        signal: For STOP: the signal that the workers get first.
    """

    action: Action
    outcome: Outcome | None = None
    signal: int = signal.SIGTERM


def decide(status: GroupStatus) -> Decision:
    """Decides the next step.

    A failure counts before a signal to the launcher: it came first, or the job would have been stopped.

    Args:
        status: The job at this moment.

    Returns:
        FINISH when all workers ended well; STOP when one failed or was suspended for too long, when the launcher
        was told to end, or when the time is over; otherwise WAIT.
    """
    if all(worker.has_ended and not worker.has_failed for worker in status.workers):
        return Decision(Action.FINISH, Outcome.SUCCEEDED)
    if any(worker.has_failed or _hangs_in_shutdown(worker, status) for worker in status.workers):
        return Decision(Action.STOP, Outcome.FAILED)
    if any(_is_suspended_too_long(worker, status) for worker in status.workers):
        return Decision(Action.STOP, Outcome.FAILED)
    if status.signals:
        return Decision(Action.STOP, Outcome.INTERRUPTED, status.signals[0])
    if status.timeout_s is not None and status.elapsed_s >= status.timeout_s:
        return Decision(Action.STOP, Outcome.TIMED_OUT)
    return Decision(Action.WAIT)


def _is_suspended_too_long(worker: WorkerStatus, status: GroupStatus) -> bool:
    # A single worker makes nobody wait: whoever suspended it may wake it up when they like.
    if worker.suspended_at is None or status.patience_s is None or len(status.workers) == 1:
        return False
    return status.now - worker.suspended_at > status.patience_s


def _hangs_in_shutdown(worker: WorkerStatus, status: GroupStatus) -> bool:
    # A single worker makes nobody wait: it may take its time, as under plain Python.
    return len(status.workers) > 1 and worker.crash is not None and status.now - worker.crash.time > SHUTDOWN_S
