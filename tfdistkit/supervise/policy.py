"""What to do about what is seen: one pure function, so every case can be tested without a process."""

from __future__ import annotations

from tfdistkit.supervise.coordinated import decide_coordinated
from tfdistkit.supervise.decision import Action, Decision, Outcome, on_failure, on_request
from tfdistkit.supervise.status import GroupStatus


def decide(status: GroupStatus) -> Decision:
    """Decides the next step.

    A failure counts before a signal to the launcher: it came first, or the job would have been stopped.

    Args:
        status: The job at this moment.

    Returns:
        FINISH when the job is done; STOP when one of those failed or was suspended for too long that the others
        cannot do without, when the launcher was told to end, or when the time is over; RESTART instead of STOP
        after a failure, as long as restarts are left; otherwise WAIT. See `coordinated` for parameter servers.
    """
    return _decide_together(status) if status.coordinator is None else decide_coordinated(status, status.coordinator)


def _decide_together(status: GroupStatus) -> Decision:
    """All are alike, and nobody can go on without the others."""
    if all(worker.has_ended_well for worker in status.workers):
        return Decision(Action.FINISH, Outcome.SUCCEEDED)
    if any(status.is_broken(worker) for worker in status.workers):
        return on_failure(status)
    # A single worker makes nobody wait: whoever suspended it may wake it up when they like.
    patience_s = status.patience_s if len(status.workers) > 1 else None
    if patience_s is not None and any(status.is_suspended(worker, patience_s) for worker in status.workers):
        return on_failure(status)
    return on_request(status) or Decision(Action.WAIT)
