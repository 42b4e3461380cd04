"""Watch the workers of a job, decide, act, and tell what happened."""

from tfdistkit.supervise.policy import Action, Decision, Outcome, decide
from tfdistkit.supervise.status import GroupStatus, WorkerStatus
from tfdistkit.supervise.supervisor import JobResult, run_job

__all__ = [
    "Action",
    "Decision",
    "GroupStatus",
    "JobResult",
    "Outcome",
    "WorkerStatus",
    "decide",
    "run_job",
]
