"""Supervise a job: observe its processes, decide, act, and report the result."""

from tfdistkit.supervise.decision import Action, Decision, Outcome
from tfdistkit.supervise.policy import decide
from tfdistkit.supervise.result import JobResult
from tfdistkit.supervise.status import GroupStatus, WorkerStatus
from tfdistkit.supervise.supervisor import run_job

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
