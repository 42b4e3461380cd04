"""The policy for a job with a coordinator, workers and parameter servers.

The coordinator and the servers, which hold the variables, are required. Workers are stateless: a failed one can be
replaced at its address, or dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from tfdistkit.supervise.decision import Action, Decision, Outcome, on_failure, on_request
from tfdistkit.supervise.status import GroupStatus, WorkerStatus

# A suspended worker blocks its scheduled steps, a suspended server blocks all processes. Long enough for a manual
# `kill -STOP` and `-CONT`, short enough for a wait without a message.
SUSPENDED_S = 10.0
# Servers and workers exit successfully after the coordinator, whose process may take a while to join TensorFlow's and
# the user's threads. After this time, they exited too early.
LEFT_EARLY_S = 10.0


def decide_coordinated(status: GroupStatus, coordinator: WorkerStatus) -> Decision:
    """Decides the next action for a job with a coordinator.

    Args:
        status: The current status of the job.
        coordinator: Its chief.

    Returns:
        FINISH when the coordinator succeeded, whatever its peers do. After a failure of the coordinator or of a server
        RESTART or, without restarts left, STOP; STOP also when no worker is left, and when a process exited although
        the coordinator needs it. For single processes: KILL when suspended, REPLACE or GIVE_UP when failed.
    """
    if coordinator.has_ended_well:
        return Decision(Action.FINISH, Outcome.SUCCEEDED)
    broken = _select(status, status.is_broken)
    if required := tuple(index for index in broken if status.workers[index].role != "worker"):
        return on_failure(status, required)
    left = _select(status, lambda one: one.has_ended_well)
    if any(status.now - (status.workers[index].ended_at or 0.0) > LEFT_EARLY_S for index in left):
        # The script exits early on its own: a restart would do the same.
        return Decision(Action.STOP, Outcome.FAILED, indices=left)
    workers = _select(status, lambda one: one.role == "worker")
    may_replace = status.may_restart and not all(status.workers[index].is_given_up for index in workers)
    if not may_replace and set(workers) <= set(broken):
        return Decision(Action.STOP, Outcome.FAILED, indices=workers)
    return on_request(status) or _decide_for_workers(status, broken)


def _decide_for_workers(status: GroupStatus, broken: tuple[int, ...]) -> Decision:
    lost = tuple(index for index in broken if not status.workers[index].is_given_up)
    if due := tuple(index for index in lost if status.may_restart and status.is_due(status.workers[index])):
        return Decision(Action.REPLACE, indices=due[: status.restarts_left])
    if lost and not status.may_restart:
        return Decision(Action.GIVE_UP, indices=lost)
    # Except the coordinator, which may stay suspended.
    suspended = _select(status, lambda one: one.role != "chief" and status.is_suspended(one, SUSPENDED_S))
    return Decision(Action.KILL, indices=suspended) if suspended else Decision(Action.WAIT)


def _select(status: GroupStatus, condition: Callable[[WorkerStatus], bool]) -> tuple[int, ...]:
    """Returns the indices of the processes that meet a condition."""
    return tuple(index for index, worker in enumerate(status.workers) if condition(worker))
