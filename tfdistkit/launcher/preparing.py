"""Prepare an attempt at a job: plan its processes, and connect to its hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfdistkit.launcher.backend import Backend
from tfdistkit.launcher.planning import plan_job, plan_processes
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec, ProcessSpec


@dataclass(frozen=True)
class Prepared:
    """An attempt that is ready to start.

    Args:
        processes: The processes to start.
        backend: The open backend, which the caller must close; None if `registry.load_backend` still has to open one.
        report: The preflight report for the user; empty without one.
        nodes: The name of the node of each process, where the backend has chosen it (`BackendRow.capacity`).
    """

    processes: tuple[ProcessSpec, ...]
    backend: Backend | None = None
    report: str = ""
    nodes: tuple[str, ...] = ()


def prepare_attempt(job: JobSpec, attempt: int = 0, stop_requested: Callable[[], bool] = lambda: False) -> Prepared:
    """Plans an attempt at a job; for other hosts, also connects to them and runs the preflight check.

    Args:
        job: The job.
        attempt: The number of earlier attempts.
        stop_requested: Whether the user has asked to stop.

    Raises:
        TfdistkitError: if this machine or a host lacks what the job needs.
    """
    if job.hosts is None:
        return Prepared(plan_job(job, attempt))
    row = row_of(job.backend)
    backend = row.load(row.on_hosts)(job, stop_requested)
    try:
        processes = plan_processes(job, backend.places, python=backend.python, attempt=attempt)
    except BaseException:
        backend.close()
        raise
    return Prepared(processes, backend, backend.table, getattr(backend, "nodes", ()))
