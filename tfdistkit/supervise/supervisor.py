"""A job from its start to its end: one attempt, or several where it may be started again after a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tfdistkit.errors import TfdistkitError
from tfdistkit.launcher.backend import Backend, load_backend
from tfdistkit.launcher.console import Console
from tfdistkit.launcher.preparing import prepare_attempt
from tfdistkit.launcher.spec import JobSpec, ProcessSpec, make_folders
from tfdistkit.report.events import EventLog
from tfdistkit.report.failures import Failure
from tfdistkit.report.names import listed
from tfdistkit.report.private_files import make_folder
from tfdistkit.report.summary import describe_run
from tfdistkit.supervise.attempt import Attempt
from tfdistkit.supervise.result import History, JobResult


def run_job(
    job: JobSpec,
    processes: Sequence[ProcessSpec],
    console: Console,
    signals: Sequence[int] = (),
    backend: Backend | None = None,
) -> JobResult:
    """Runs a job to its end. Whatever happens here, no process of it is left.

    Args:
        job: What the user wants.
        processes: What to start for it.
        console: Where the workers' output is shown.
        signals: The signals that this process was sent; it grows while the job runs.
        backend: Where the processes run, if it is open already (see `launcher.preparing`); it is closed in any case.

    Returns:
        How the job came out.

    Raises:
        OptionError: if the run folder cannot be written.
        TfdistkitError: if this machine lacks what the backend needs; nothing was started then.
    """
    with contextlib.ExitStack() as stack:
        if backend is not None:
            stack.callback(backend.close)
        events = stack.enter_context(EventLog(job.run_dir))
        make_folders(job.run_dir, processes)
        backend = backend or load_backend(job.backend, job.job_id, job.size, job.mpi_args)
        history = History(job.max_restarts)
        events.add("job_started", job_id=job.job_id, program=job.program, np=job.world_size, ps=job.ps)
        while True:
            attempt = Attempt(job, backend, console, events, signals, history)
            try:
                result, goes_on = attempt.to_the_end(processes)
            finally:
                # Also on the way of an exception, such as the KeyboardInterrupt of a notebook.
                attempt.leave_nothing()
            prepared = _prepare(job, result, console, events, history, signals) if goes_on else None
            if prepared is None:
                break
            processes, backend = prepared
        events.add(
            "job_ended",
            outcome=result.outcome.value,
            exit_code=result.exit_code,
            elapsed_s=round(result.elapsed_s, 3),
            attempt=result.attempt,
            first_failure=_as_event(result.failures[0]) if result.failures else None,
        )
        return result


def _prepare(
    job: JobSpec, result: JobResult, console: Console, events: EventLog, history: History, signals: Sequence[int]
) -> tuple[tuple[ProcessSpec, ...], Backend] | None:
    """Makes the next attempt ready, with ports of its own; None when this machine does not let us any more."""
    count = history.count_restart()
    history.attempt += 1
    cause = f"{result.failures[0].name} {result.failures[0].headline}" if result.failures else ""
    cause = cause or f"{listed(result.suspended)} had been suspended (SIGSTOP)"
    told = describe_run(result.failures, suspended=result.suspended, stopped=result.stopped, left=result.left)
    console.note(
        f"tfdistkit: attempt {result.attempt} failed after {result.elapsed_s:.1f} s: the first failure was\n{told}\n"
        f"tfdistkit: everything starts again as attempt {history.attempt} ({count})."
    )
    history.incidents.append(f"{cause} after {result.elapsed_s:.1f} s: everything started again ({count}).")
    events.add("job_restarting", attempt=history.attempt, after=cause)
    try:
        prepared = prepare_attempt(job, history.attempt, hurry=lambda: bool(signals))
        with contextlib.ExitStack() as stack:
            if prepared.backend is not None:
                stack.callback(prepared.backend.close)
            for process in prepared.processes:
                make_folder(process.folder)
            backend = prepared.backend or load_backend(job.backend, job.job_id, job.size, job.mpi_args)
            stack.pop_all()
    except (TfdistkitError, OSError) as problem:
        console.note(f"tfdistkit: it cannot be started again: {problem}")
        return None
    if prepared.told:
        console.note(prepared.told)
    return prepared.processes, backend


def _as_event(failure: Failure) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(failure).items()}
