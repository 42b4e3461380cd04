"""Start the processes of a job: the request (spec), the plan (planning), the start (one backend per platform)."""

from tfdistkit.launcher.backend import Backend, WorkerHandle
from tfdistkit.launcher.planning import plan_job, plan_processes
from tfdistkit.launcher.registry import load_backend
from tfdistkit.launcher.spec import JobSpec, ProcessSpec

__all__ = ["Backend", "JobSpec", "ProcessSpec", "WorkerHandle", "load_backend", "plan_job", "plan_processes"]
