"""The decisions that the supervisor can take."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from tfdistkit.supervise.status import GroupStatus


class Action(enum.Enum):
    """The next action of the supervisor; the last three apply to single processes."""

    WAIT = "wait"
    FINISH = "finish"
    STOP = "stop"
    RESTART = "restart"
    RESIZE = "resize"
    REPLACE = "replace"
    GIVE_UP = "give up"
    KILL = "kill"


class Outcome(enum.Enum):
    """The outcome of a job."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Decision:
    """A decision of the supervisor.

    Args:
        action: The next action.
        outcome: The outcome, if the action ends the job or the attempt.
        signal: For STOP and RESTART: the first signal to the workers.
        indices: The processes that the action applies to, or that caused it, as indices.
    """

    action: Action
    outcome: Outcome | None = None
    signal: int = signal.SIGTERM
    indices: tuple[int, ...] = ()

    @property
    def ends_attempt(self) -> bool:
        """Whether the action is about all processes, and ends the attempt."""
        return self.action in (Action.FINISH, Action.STOP, Action.RESTART, Action.RESIZE)


def on_failure(status: GroupStatus, indices: tuple[int, ...] = ()) -> Decision:
    """Decides how to answer a fatal failure.

    Args:
        status: The current status of the job.
        indices: The processes that failed.

    Returns:
        RESTART if restarts are left, else STOP.
    """
    return Decision(Action.RESTART if status.may_restart else Action.STOP, Outcome.FAILED, indices=indices)


def on_request(status: GroupStatus) -> Decision | None:
    """Decides whether a signal or the timeout ends the job.

    Args:
        status: The current status of the job.

    Returns:
        STOP, or None.
    """
    if status.signals:
        return Decision(Action.STOP, Outcome.INTERRUPTED, status.signals[0])
    if status.is_out_of_time:
        return Decision(Action.STOP, Outcome.TIMED_OUT)
    return None
