"""The loop that runs a job: start -> look -> decide -> act -> report."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdistkit.launcher.backend import Backend, WorkerHandle, load_backend
from tfdistkit.launcher.console import Console
from tfdistkit.launcher.logs import LogPump
from tfdistkit.launcher.spec import JobSpec, ProcessSpec, make_folders
from tfdistkit.report.crashes import read_crash
from tfdistkit.report.events import EventLog
from tfdistkit.report.failures import Failure, first_cause_first, signal_name
from tfdistkit.supervise.policy import Action, Decision, Outcome, decide
from tfdistkit.supervise.status import GroupStatus, WorkerStatus
from tfdistkit.supervise.stopping import stop_workers

# How often crash records, signals and deadlines are looked at; the end of a worker is seen at once.
_LOOK_S = 0.1
# How long the last output may take to be shown.
_OUTPUT_DEADLINE_S = 2.0

# As the command `timeout` does.
TIMED_OUT_EXIT_CODE = 124
# Nobody failed: the job was ended because a worker was suspended.
_SUSPENDED_EXIT_CODE = 1


@dataclass(frozen=True)
class JobResult:
    """How a job came out.

    Args:
        outcome: In one word.
        exit_code: What the launcher ends with.
        failures: The workers that failed by themselves, first cause first.
        suspended: The ranks that were found suspended (SIGSTOP) when the job failed.
        stopped: The ranks that the launcher had to stop.
        elapsed_s: How long the job took until its outcome was clear.
    """

    outcome: Outcome
    exit_code: int
    failures: tuple[Failure, ...] = ()
    suspended: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    elapsed_s: float = 0.0


def run_job(
    job: JobSpec,
    processes: Sequence[ProcessSpec],
    console: Console,
    signals: Sequence[int] = (),
) -> JobResult:
    """Runs a job to its end. Whatever happens here, no process of it is left.

    Args:
        job: What the user wants.
        processes: What to start for it.
        console: Where the workers' output is shown.
        signals: The signals that this process was sent; it grows while the job runs.

    Returns:
        How the job came out.

    Raises:
        OptionError: if the run folder cannot be written.
        TfdistkitError: if this machine lacks what the backend needs; nothing was started then.
    """
    make_folders(job.run_dir, job.world_size)
    with EventLog(job.run_dir) as events:
        backend = load_backend(job.backend, job.job_id, job.world_size)
        run = _Run(job, backend, console, events, signals)
        try:
            return run.to_the_end(processes)
        finally:
            # Also on the way of an exception, such as the KeyboardInterrupt of a notebook.
            run.leave_nothing()


class _Run:
    """One run of a job: its workers, and what was seen of them."""

    def __init__(
        self, job: JobSpec, backend: Backend, console: Console, events: EventLog, signals: Sequence[int]
    ) -> None:
        self._job, self._backend, self._events, self._signals = job, backend, events, signals
        self._console = console
        self._pump = LogPump(console)
        self._workers: list[WorkerHandle] = []
        self._seen: dict[int, WorkerStatus] = {}
        self._started = time.monotonic()
        self._has_left = False

    def to_the_end(self, processes: Sequence[ProcessSpec]) -> JobResult:
        self._events.add("job_started", job_id=self._job.job_id, program=self._job.program, np=self._job.world_size)
        self._start(processes)
        status = self._look()
        while (decision := decide(status)).action is Action.WAIT:
            self._backend.wait(_LOOK_S)
            status = self._look()
        # Once more: the cause may have come up while the consequence was looked at.
        result = self._act(self._look(), decision)
        self._events.add(
            "job_ended",
            outcome=result.outcome.value,
            exit_code=result.exit_code,
            elapsed_s=round(result.elapsed_s, 3),
            first_failure=_as_event(result.failures[0]) if result.failures else None,
        )
        return result

    def leave_nothing(self) -> None:
        """Ends what is still there; a second call does nothing."""
        if self._has_left:
            return
        self._has_left = True
        if any(not worker.is_gone() for worker in self._workers):
            self._events.add("stopping", signal="SIGTERM")
            stop_workers(self._workers, signal.SIGTERM)
        self._backend.close()
        if self._pump.is_alive():
            self._pump.finish(_OUTPUT_DEADLINE_S)

    def _start(self, processes: Sequence[ProcessSpec]) -> None:
        for spec in processes:
            worker = self._backend.start(spec)
            self._workers.append(worker)
            self._pump.add(worker)
            self._events.add("worker_started", rank=spec.rank, host=worker.host, pid=worker.pid)
        self._pump.start()

    def _look(self) -> GroupStatus:
        for worker in self._workers:
            rank = worker.spec.rank
            before = self._seen.get(rank, WorkerStatus(rank))
            if not before.has_ended:
                self._seen[rank] = _look_at(worker, before)
                if self._seen[rank].has_ended:
                    self._events.add("worker_ended", rank=rank, exit_code=self._seen[rank].exit_code)
        return GroupStatus(
            workers=tuple(self._seen[worker.spec.rank] for worker in self._workers),
            now=time.time(),
            elapsed_s=time.monotonic() - self._started,
            timeout_s=self._job.timeout_s,
            signals=tuple(self._signals),
            patience_s=self._backend.patience_s,
        )

    def _act(self, status: GroupStatus, decision: Decision) -> JobResult:
        assert decision.outcome is not None
        failures = first_cause_first(
            _failure(worker, seen)
            for worker, seen in zip(self._workers, status.workers, strict=True)
            if seen.has_failed or seen.crash is not None
        )
        suspended = tuple(worker.spec.rank for worker in self._workers if worker.is_suspended())
        stopped = tuple(seen.rank for seen in status.workers if not seen.has_ended and seen.crash is None)
        if decision.action is Action.STOP:
            self._stop(decision, stopped)
        self.leave_nothing()
        return JobResult(
            outcome=decision.outcome,
            exit_code=_exit_code(decision, failures),
            failures=failures,
            suspended=suspended if decision.action is Action.STOP else (),
            stopped=stopped,
            elapsed_s=status.elapsed_s,
        )

    def _stop(self, decision: Decision, stopped: Sequence[int]) -> None:
        name = signal_name(decision.signal)
        self._events.add("stopping", signal=name, ranks=list(stopped))
        if decision.outcome is Outcome.INTERRUPTED:
            self._console.note(f"tfdistkit: {name}: stopping the workers (once more to kill them at once).")
        received = len(self._signals)
        stop_workers(self._workers, decision.signal, hurry=lambda: len(self._signals) > received)


def _look_at(worker: WorkerHandle, before: WorkerStatus) -> WorkerStatus:
    now = time.time()
    # In this order: a worker writes its record before it ends.
    exit_code = worker.exit_code()
    crash = before.crash or read_crash(worker.spec.folder)
    if exit_code is None:
        suspended_at = (before.suspended_at or now) if worker.is_suspended() else None
        return WorkerStatus(before.rank, alive_at=now, crash=crash, suspended_at=suspended_at)
    return WorkerStatus(before.rank, exit_code, ended_at=now, alive_at=before.alive_at, crash=crash)


def _failure(worker: WorkerHandle, seen: WorkerStatus) -> Failure:
    """What is known of a worker that failed."""
    spec, crash = worker.spec, seen.crash
    killed_by = -seen.exit_code if seen.exit_code is not None and seen.exit_code < 0 else None
    if crash is not None:
        return Failure(
            rank=spec.rank,
            host=crash.host,
            pid=crash.pid,
            exit_code=crash.exit_code,
            time=crash.time,
            error_type=crash.type,
            message=crash.message,
            traceback=crash.traceback,
            log_path=spec.stderr_path,
        )
    ended_at = seen.ended_at or seen.alive_at
    return Failure(
        rank=spec.rank,
        host=worker.host,
        pid=worker.pid,
        exit_code=128 + killed_by if killed_by else (seen.exit_code or 0),
        # Peers notice a killed worker within a millisecond and write the exact time of their own exception; the
        # launcher notices it somewhat later.
        time=seen.alive_at if killed_by else ended_at,
        signal=signal_name(killed_by) if killed_by else None,
        log_path=spec.stderr_path,
    )


def _exit_code(decision: Decision, failures: Sequence[Failure]) -> int:
    if decision.outcome is Outcome.FAILED:
        return failures[0].exit_code if failures else _SUSPENDED_EXIT_CODE
    if decision.outcome is Outcome.INTERRUPTED:
        return 128 + decision.signal
    return TIMED_OUT_EXIT_CODE if decision.outcome is Outcome.TIMED_OUT else 0


def _as_event(failure: Failure) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(failure).items()}
