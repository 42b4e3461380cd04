"""What the supervisor can do next."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from tfdistkit.supervise.status import GroupStatus


class Action(enum.Enum):
    """What the supervisor does next; the last three concern some processes only."""

    WAIT = "wait"
    FINISH = "finish"
    STOP = "stop"
    RESTART = "restart"
    REPLACE = "replace"
    GIVE_UP = "give up"
    KILL = "kill"


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
        outcome: How the job came out, when this ends it, or this attempt at it.
        signal: For STOP and RESTART: the signal that the workers get first.
        who: Whom it concerns, or whose fault it is: places in the order of the processes.
    """

    action: Action
    outcome: Outcome | None = None
    signal: int = signal.SIGTERM
    who: tuple[int, ...] = ()


def on_failure(status: GroupStatus, who: tuple[int, ...] = ()) -> Decision:
    """Decides what a failure that nobody can go on after comes to.

    Args:
        status: The job at this moment.
        who: Whose failure it is.

    Returns:
        RESTART if something may still be started again, else STOP.
    """
    return Decision(Action.RESTART if status.may_restart else Action.STOP, Outcome.FAILED, who=who)


def on_request(status: GroupStatus) -> Decision | None:
    """Decides whether the user or the clock ends the job.

    Args:
        status: The job at this moment.

    Returns:
        STOP, or None.
    """
    if status.signals:
        return Decision(Action.STOP, Outcome.INTERRUPTED, status.signals[0])
    if status.is_out_of_time:
        return Decision(Action.STOP, Outcome.TIMED_OUT)
    return None
