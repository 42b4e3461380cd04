"""The supervision policy: one pure function from status to decision, testable without processes."""

from __future__ import annotations

from tfdistkit.supervise.coordinated import decide_coordinated
from tfdistkit.supervise.decision import Action, Decision, Outcome, on_failure, on_request
from tfdistkit.supervise.status import GroupStatus


def decide(status: GroupStatus) -> Decision:
    """Decides the next action.

    A failure takes precedence over a signal to the launcher: it came first, or the job would have been stopped.

    Args:
        status: The current status of the job.

    Returns:
        FINISH when the job is done; STOP when a required process failed or was suspended for too long, when the job
        hangs, when the launcher received a signal, or when the timeout expired; RESTART instead of STOP after a failure
        or a hang while restarts are left; RESIZE when a worker of an elastic job has made the backup that it was asked
        for; otherwise WAIT. See `coordinated` for parameter servers.
    """
    coordinator = status.coordinator
    decision = _decide_together(status) if coordinator is None else decide_coordinated(status, coordinator)
    return on_failure(status) if decision.action is Action.WAIT and status.is_hung else decision


def _decide_together(status: GroupStatus) -> Decision:
    """Decides for a job whose workers all depend on each other."""
    if all(worker.has_ended_well for worker in status.workers):
        return Decision(Action.FINISH, Outcome.SUCCEEDED)
    if status.has_left_as_asked:
        return on_request(status) or Decision(Action.RESIZE, Outcome.INTERRUPTED)
    if any(status.is_broken(worker) for worker in status.workers):
        return on_failure(status)
    # A single worker has no waiting peers: it may stay suspended.
    patience_s = status.patience_s if len(status.workers) > 1 else None
    if patience_s is not None and any(status.is_suspended(worker, patience_s) for worker in status.workers):
        return on_failure(status)
    return on_request(status) or Decision(Action.WAIT)
