"""Run a job from start to end: one attempt, or several if restarts are allowed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tfdistkit.errors import TfdistkitError
from tfdistkit.launcher.backend import Backend
from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.registry import load_backend
from tfdistkit.launcher.spec import JobSpec, ProcessSpec, make_folders
from tfdistkit.report.events import EventLog
from tfdistkit.report.failures import Failure
from tfdistkit.report.names import listed
from tfdistkit.report.private_files import make_folder
from tfdistkit.report.secret_values import without_secrets_in
from tfdistkit.report.summary import describe_run
from tfdistkit.supervise.attempt import TIMED_OUT_EXIT_CODE, Attempt
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.elastic.changes import Changes
from tfdistkit.supervise.hangs.own_disk import OwnDiskWatch
from tfdistkit.supervise.restarting import Repeats, first_of, pause
from tfdistkit.supervise.result import History, JobResult


def run_job(
    job: JobSpec,
    processes: Sequence[ProcessSpec],
    console: Console,
    signals: Sequence[int] = (),
    backend: Backend | None = None,
    changes: Changes | None = None,
) -> JobResult:
    """Runs a job to its end, and leaves none of its processes running, even after an exception.

    Args:
        job: The job.
        processes: The processes to start.
        console: Shows the workers' output.
        signals: The signals that this process received; it grows while the job runs.
        backend: The backend if it is already open (see `launcher.preparing`); this function always closes it.
        changes: What prepared the first attempt of an elastic job; this function always closes it.

    Returns:
        The result of the job.

    Raises:
        OptionError: if the run folder cannot be written.
        TfdistkitError: if this machine lacks a prerequisite of the backend; nothing was started then.
    """
    with contextlib.ExitStack() as stack:
        if backend is not None:
            stack.callback(backend.close)
        changes = changes or Changes(job, console.note)
        stack.callback(changes.close)
        stack.enter_context(OwnDiskWatch())
        events = stack.enter_context(EventLog(job.run_dir))
        make_folders(job.run_dir, processes)
        backend = backend or load_backend(job.backend, job.job_id, job.size, job.mpi_args, job.backend_options)
        history = History(job.max_restarts, window_s=job.restart_window_s)
        changes.begin_job(console.note, events, history)
        program = without_secrets_in(job.program)
        events.add("job_started", job_id=job.job_id, program=program, np=job.world_size, ps=job.ps)
        repeats = Repeats()
        while True:
            started = time.monotonic()
            attempt = Attempt(job, backend, console, events, signals, history, changes)
            try:
                result, goes_on = attempt.to_the_end(processes)
            finally:
                # Also after an exception, such as the KeyboardInterrupt of a notebook.
                attempt.leave_nothing()
            if not goes_on:
                break
            is_repeated, wait_s = repeats.give_up(first_of(result.failures), time.monotonic() - started), 0.0
            if changes.answers(result, processes):
                history.attempt += 1
            elif history.restarts_left <= 0:  # an elastic job whose failure no change answers
                break
            elif is_repeated:
                console.note(_repeated_failure_message(result, history, repeats.in_a_row))
                break
            else:
                wait_s = history.backoff.wait_s
                _announce(result, console, events, history, wait_s)
            result, prepared = _prepare(changes, result, console, history, wait_s, signals)
            if prepared is None:
                break
            job, processes, backend = prepared
        events.add(
            "job_ended",
            outcome=result.outcome.value,
            exit_code=result.exit_code,
            elapsed_s=round(result.elapsed_s, 3),
            attempt=result.attempt,
            first_failure=_as_event(result.failures[0]) if result.failures else None,
        )
        return result


def _repeated_failure_message(result: JobResult, history: History, in_a_row: int) -> str:
    """Explains why a job is given up before its restarts are used up."""
    steps = result.failures[0].steps
    when = f"after step {steps}, {in_a_row} times in a row" if steps else "before a step was trained"
    left = "1 restart is" if history.restarts_left == 1 else f"{history.restarts_left} restarts are"
    return (
        f"tfdistkit: attempt {result.attempt} failed like attempt {result.attempt - 1}: with the same exception, in "
        f"the same place, {when}. It is not restarted ({left} left): fix the script first."
    )


def _announce(result: JobResult, console: Console, events: EventLog, history: History, wait_s: float) -> None:
    """Reports a failed attempt, and announces the next one."""
    count = history.count_restart()
    history.attempt += 1
    cause = f"{result.failures[0].name} {result.failures[0].headline}" if result.failures else ""
    cause = cause or ("the job hung" if result.hang else f"{listed(result.suspended)} had been suspended (SIGSTOP)")
    report = describe_run(
        result.failures, suspended=result.suspended, stopped=result.stopped, left=result.left, hang=result.hang
    )
    how = "failed" if result.failures or not result.hang else "hung"
    first = "the first failure was" if how == "failed" else "no rank made progress,"
    console.note(
        f"tfdistkit: attempt {result.attempt} {how} after {result.elapsed_s:.1f} s: {first}\n{report}\n"
        f"tfdistkit: everything starts again as attempt {history.attempt} ({count}) in {wait_s:.2g} s."
    )
    history.incidents.append(f"{cause} after {result.elapsed_s:.1f} s: everything started again ({count}).")
    events.add("job_restarting", attempt=history.attempt, after=cause, wait_s=wait_s)


def _prepare(
    changes: Changes, result: JobResult, console: Console, history: History, wait_s: float, signals: Sequence[int]
) -> tuple[JobResult, tuple[JobSpec, tuple[ProcessSpec, ...], Backend] | None]:
    """Waits for the backoff, and prepares the next attempt with new ports.

    Returns:
        The result if there is no next attempt, and the job, processes and backend of the next attempt; None if a
        signal or the timeout ended the job meanwhile, or if the preparation failed.
    """
    timeout_s = math.inf if changes.timeout_s is None else changes.timeout_s

    def is_over() -> bool:
        return bool(signals or changes.signals) or history.elapsed_s >= timeout_s

    pause(wait_s, is_over)
    problem: Exception | None = None
    if not is_over():
        try:
            return result, _open_next(changes, history, console, is_over)
        except (TfdistkitError, OSError) as error:
            problem = error
    if received := (*signals, *changes.signals):
        return replace(result, outcome=Outcome.INTERRUPTED, exit_code=128 + received[0]), None
    if history.elapsed_s >= timeout_s:
        return replace(result, outcome=Outcome.TIMED_OUT, exit_code=TIMED_OUT_EXIT_CODE), None
    console.note(f"tfdistkit: the job cannot be {'continued' if changes.is_elastic else 'restarted'}: {problem}")
    if result.is_planned:
        result = replace(result, outcome=Outcome.FAILED, exit_code=1)
    return result, None


def _open_next(
    changes: Changes, history: History, console: Console, is_over: Callable[[], bool]
) -> tuple[JobSpec, tuple[ProcessSpec, ...], Backend]:
    """Plans the next attempt, creates its folders and opens its backend."""
    job, prepared = changes.prepare(history.attempt, is_over)
    with contextlib.ExitStack() as stack:
        if prepared.backend is not None:
            stack.callback(prepared.backend.close)
        for process in prepared.processes:
            make_folder(process.folder)
        backend = prepared.backend or load_backend(job.backend, job.job_id, job.size, job.mpi_args, job.backend_options)
        stack.pop_all()
    if prepared.report:
        console.note(prepared.report)
    return job, prepared.processes, backend


def _as_event(failure: Failure) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(failure).items()}
