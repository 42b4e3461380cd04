"""The policy for a job with a coordinator, workers and parameter servers.

Everything hangs on the coordinator and on the servers, where the variables live. The workers compute what they are
told to: one that dies can be replaced at its address, or be done without.
"""

from __future__ import annotations

from collections.abc import Callable

from tfdistkit.supervise.decision import Action, Decision, Outcome, on_failure, on_request
from tfdistkit.supervise.status import GroupStatus, WorkerStatus

# A suspended worker holds the work that it was given, and nobody else does it; a suspended server holds everybody up.
# Long enough for somebody's `kill -STOP` and `-CONT`, short enough for a wait without a message.
SUSPENDED_S = 10.0
# A server or worker ends well when the coordinator is gone, and the coordinator's process may need a while to end:
# TensorFlow's and the user's threads. After that it must have left too early.
LEFT_EARLY_S = 10.0


def decide_coordinated(status: GroupStatus, coordinator: WorkerStatus) -> Decision:
    """Decides the next step of a job with a coordinator.

    Args:
        status: The job at this moment.
        coordinator: Its chief.

    Returns:
        FINISH when the coordinator ended well, whatever the others do. After a failure of the coordinator or of a
        server RESTART or, without restarts left, STOP; STOP also when no worker is left, and when one ended although
        the coordinator needs it. For single processes: KILL when suspended, REPLACE or GIVE_UP when failed.
    """
    if coordinator.has_ended_well:
        return Decision(Action.FINISH, Outcome.SUCCEEDED)
    broken = _those(status, status.is_broken)
    if vital := tuple(place for place in broken if status.workers[place].role != "worker"):
        return on_failure(status, vital)
    left = _those(status, lambda one: one.has_ended_well)
    if any(status.now - (status.workers[place].ended_at or 0.0) > LEFT_EARLY_S for place in left):
        # The script does so by itself: it would do so again.
        return Decision(Action.STOP, Outcome.FAILED, who=left)
    workers = _those(status, lambda one: one.role == "worker")
    may_replace = status.may_restart and not all(status.workers[place].is_given_up for place in workers)
    if not may_replace and set(workers) <= set(broken):
        return Decision(Action.STOP, Outcome.FAILED, who=workers)
    return on_request(status) or _care_for_workers(status, broken)


def _care_for_workers(status: GroupStatus, broken: tuple[int, ...]) -> Decision:
    lost = tuple(place for place in broken if not status.workers[place].is_given_up)
    if due := tuple(place for place in lost if status.may_restart and status.is_due(status.workers[place])):
        return Decision(Action.REPLACE, who=due[: status.restarts_left])
    if lost and not status.may_restart:
        return Decision(Action.GIVE_UP, who=lost)
    # Not the coordinator: whoever suspended it may wake it up when they like.
    held = _those(status, lambda one: one.role != "chief" and status.is_suspended(one, SUSPENDED_S))
    return Decision(Action.KILL, who=held) if held else Decision(Action.WAIT)


def _those(status: GroupStatus, wanted: Callable[[WorkerStatus], bool]) -> tuple[int, ...]:
    return tuple(place for place, worker in enumerate(status.workers) if wanted(worker))
