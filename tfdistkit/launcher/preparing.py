"""What has to be known and open before an attempt at a job begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfdistkit.launcher.backend import Backend
from tfdistkit.launcher.planning import plan_job, plan_processes
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec, ProcessSpec


@dataclass(frozen=True)
class Prepared:
    """An attempt that can begin.

    Args:
        processes: What to start.
        backend: Where, if that is open already; whoever gets this closes it. None: see `registry.load_backend`.
        told: What the user should see of the preparation; or an empty string.
    """

    processes: tuple[ProcessSpec, ...]
    backend: Backend | None = None
    told: str = ""


def prepare_attempt(job: JobSpec, attempt: int = 0, hurry: Callable[[], bool] = lambda: False) -> Prepared:
    """Plans an attempt at a job; on other hosts that means to connect to them, and to look whether all is well.

    Args:
        job: What the user wants.
        attempt: How often the job was started again before.
        hurry: Whether somebody has asked to end.

    Raises:
        TfdistkitError: if this machine or a host lacks what the job needs.
    """
    if job.hosts is None:
        return Prepared(plan_job(job, attempt))
    row = row_of(job.backend)
    backend = row.load(row.on_hosts)(job, hurry)
    try:
        processes = plan_processes(job, backend.places, python=job.hosts.python, attempt=attempt)
    except BaseException:
        backend.close()
        raise
    return Prepared(processes, backend, backend.table)
