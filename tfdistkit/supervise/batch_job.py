"""A SLURM job from submission to end: show its log, report its state, and cancel it when the launcher is stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.slurm import commands as slurm
from tfdistkit.launcher.slurm.batch_script import BATCH_FILE, ENDED_FILE, PID_FILE, BatchJob
from tfdistkit.report.crashes import read_crash
from tfdistkit.report.events import EventLog
from tfdistkit.report.failures import Failure, first_cause_first, signal_name
from tfdistkit.report.names import ProcessName
from tfdistkit.report.private_files import make_folder, write_file, writing_logs
from tfdistkit.report.secret_values import without_secrets_in
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.result import JobResult

_WITHOUT_BACKUP = (
    "It was asked to make a backup, but had none yet, or makes none: pass a BackupAndResume to `fit`, and set a longer "
    "time limit (--time) or a shorter --backup-before."
)

_POLL_S = 0.2
# The poll interval of the controller grows between these: a job may wait for days.
_FIRST_QUESTION_S = 0.5
_LAST_QUESTION_S = 5.0
# Time for SLURM to end a cancelled job (KillWait, 30 s by default, and an epilog).
_CANCEL_S = 120.0
# Time for a shared file system to show the last lines.
_LAST_LINES_S = 0.5
# Time for the reader of the console to accept one chunk of the rest of the log, in seconds.
_LAST_PATIENCE_S = 5.0
# The same after a failure, where the exit code matters more.
_SHORT_PATIENCE_S = 1.0
_READ_BYTES = 1 << 18

_TIMED_OUT_EXIT_CODE = 124
# Exit codes for states in which the job has none of its own.
_EXIT_CODES = {"CANCELLED": 143, "OUT_OF_MEMORY": 137}
_OTHER_EXIT_CODE = 1
# SLURM itself ends the tasks of jobs in these states, with SIGTERM first and SIGKILL after its grace period.
_ENDED_BY_SLURM = ("BOOT_FAIL", "CANCELLED", "NODE_FAIL", "PREEMPTED")


def submit_batch_job(job: BatchJob, script: str, variables: Mapping[str, str]) -> str:
    """Writes a batch script into the run folder and submits it.

    Args:
        job: The job.
        script: The text from `launcher.slurm.batch_script`.
        variables: The environment that the job inherits.

    Returns:
        The job's id.

    Raises:
        OptionError: if the run folder cannot be written.
        TfdistkitError: if SLURM is not installed, or rejects the job.
    """
    path = job.run_dir / BATCH_FILE
    with writing_logs():
        make_folder(job.run_dir)
        write_file(path, script.encode())
        write_file(job.log_path, b"")
    return slurm.submit(path, variables)


def follow_batch_job(
    number: str, job: BatchJob, console: Console, signals: Sequence[int]
) -> tuple[JobResult, slurm.JobState]:
    """Shows the output of a job, and waits for its end.

    Args:
        number: The job's id in SLURM.
        job: The submitted job.
        console: Shows its output.
        signals: The signals that this process received; it grows. The first cancels the job, the second kills it.

    Returns:
        The result of the job, and its state in SLURM.
    """
    started = time.monotonic()
    with EventLog(job.run_dir) as events:
        events.add("job_submitted", job=number, program=without_secrets_in(job.command), tasks=job.tasks)
        follower = _Follower(number, job, console, events, signals)
        state = _remembered(follower.to_the_end(), job)
        result = _result(state, job, signals, time.monotonic() - started)
        result = replace(result, unshown_bytes=follower.unshown_bytes)
        events.add("job_ended", state=state.name, outcome=result.outcome.value, exit_code=result.exit_code)
    return result, state


class _Follower:
    """Follows one running job: polls its state, shows its log, answers signals."""

    def __init__(self, number: str, job: BatchJob, console: Console, events: EventLog, signals: Sequence[int]):
        self._number, self._job, self._console, self._events, self._signals = number, job, console, events, signals
        self._shown_bytes = 0
        self._state = slurm.JobState("")
        self._answered = 0
        self._give_up_at = float("inf")

    def to_the_end(self) -> slurm.JobState:
        """Returns the final state of the job, or its last known state after the cancel timeout."""
        started = asked = time.monotonic()
        while not self._state.has_ended and asked < self._give_up_at:
            self._ask()
            asked = time.monotonic()
            pause_s = min(_LAST_QUESTION_S, _FIRST_QUESTION_S + (asked - started) / 60)
            while time.monotonic() < asked + pause_s and not self._state.has_ended:
                self._show_log()
                self._answer_signals()
                time.sleep(_POLL_S)
        time.sleep(_LAST_LINES_S)
        self._show_log(_LAST_PATIENCE_S if self._state.is_good else _SHORT_PATIENCE_S)
        self._console.end(0, "stdout")
        return self._state

    @property
    def unshown_bytes(self) -> int:
        """The number of bytes of the log that the console did not accept in time."""
        try:
            return self._job.log_path.stat().st_size - self._shown_bytes
        except OSError:
            return 0

    def _ask(self) -> None:
        state = slurm.look_at_job(self._number)
        if state is None or str(state) == str(self._state):
            return
        self._show_log()
        self._state = state
        self._events.add("job_state", state=state.name, reason=state.reason, nodes=state.nodes)
        self._console.note(f"tfdistkit: job {self._number}: {state}")

    def _show_log(self, patience_s: float = 0.0) -> None:
        """Shows new lines of the log while the console accepts them; the rest follows at the next call."""
        data = b"more"
        while data and self._console.has_room(patience_s):
            try:
                with self._job.log_path.open("rb") as file:
                    file.seek(self._shown_bytes)
                    data = file.read(_READ_BYTES)
            except OSError:
                return
            self._shown_bytes += len(data)
            self._console.show(0, "stdout", data)

    def _answer_signals(self) -> None:
        """The first signal asks the job to end, the second kills it."""
        while self._answered < len(self._signals):
            self._answered += 1
            self._give_up_at = time.monotonic() + _CANCEL_S
            name = signal_name(self._signals[self._answered - 1])
            again = "" if self._answered > 1 else " (repeat to kill it)"
            self._console.note(f"tfdistkit: {name}: cancelling job {self._number}{again}.")
            self._events.add("cancelling", signal=name)
            complaint = slurm.cancel(self._number, None if self._answered == 1 else "KILL")
            if complaint:
                self._console.note(f"tfdistkit: {complaint}")


def _result(state: slurm.JobState, job: BatchJob, signals: Sequence[int], elapsed_s: float) -> JobResult:
    if state.is_good:
        return JobResult(Outcome.SUCCEEDED, 0, elapsed_s=elapsed_s)
    tasks = _tasks_of_last_attempt(job)
    failures = _causes(state, [task.failure for task in tasks if task.failure is not None])
    stopped = tuple(task.name for task in tasks if task.failure not in failures and not task.has_ended_well)
    if signals:
        return JobResult(Outcome.INTERRUPTED, 128 + signals[0], elapsed_s=elapsed_s)
    if state.name in ("TIMEOUT", "DEADLINE"):
        return JobResult(Outcome.TIMED_OUT, _TIMED_OUT_EXIT_CODE, elapsed_s=elapsed_s)
    code = _EXIT_CODES.get(state.name, _OTHER_EXIT_CODE)
    if state.name == "FAILED":
        code = state.exit_code or (128 + state.signal if state.signal else _OTHER_EXIT_CODE)
    code = (failures[0].exit_code if failures else 0) or code
    return JobResult(Outcome.FAILED, code, failures, (), stopped, elapsed_s)


def _causes(state: slurm.JobState, failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Returns the failures that SLURM did not cause when it ended the tasks, the first cause first."""
    ended_with = ("SIGTERM", "SIGKILL") if state.name in _ENDED_BY_SLURM else ()
    first, *rest = first_cause_first(one for one in failures if one.signal not in ended_with) or (None,)
    # After a failure SLURM sends SIGTERM to the other tasks.
    return tuple(one for one in (first, *rest) if one is not None and (one is first or one.signal != "SIGTERM"))


def _remembered(state: slurm.JobState, job: BatchJob) -> slurm.JobState:
    """Returns the state from the batch script's exit code if SLURM no longer knows the job."""
    if state.name != slurm.FORGOTTEN:
        return state
    code = _read(job.run_dir / ENDED_FILE)
    name = "COMPLETED" if code == "0" else "FAILED"
    return slurm.JobState(name, exit_code=int(code) if code.isdecimal() else 0)


@dataclass(frozen=True)
class _Task:
    """The result of one task: `failure` is None if it succeeded, or was stopped."""

    name: ProcessName
    failure: Failure | None = None
    has_ended_well: bool = False


def _tasks_of_last_attempt(job: BatchJob) -> list[_Task]:
    """Reads the task folders of the last attempt; the batch script removes the records of earlier runs."""
    attempts = {path.parents[1] for path in job.run_dir.glob(f"attempt.*/rank.*/{PID_FILE}")}
    folder = max(attempts, key=lambda path: int(path.suffix[1:]), default=job.run_dir)
    places = ((number, folder / f"rank.{number}") for number in range(job.tasks))
    return [_look_at(job, job.process_name(number), place) for number, place in places if (place / PID_FILE).exists()]


def _look_at(job: BatchJob, name: ProcessName, folder: Path) -> _Task:
    crash, pid = read_crash(folder), _read(folder / PID_FILE)
    ended = _read(folder / ENDED_FILE).split()
    if crash is None and (len(ended) != 3 or ended[0] == "0"):
        return _Task(name, has_ended_well=bool(ended))
    code, moment, host = ended if len(ended) == 3 else ("", "", "")
    exit_code = int(code) if code.isdecimal() else 0
    if crash is None:
        killed_by = exit_code - 128 if exit_code > 128 else 0
        failure = Failure(
            rank=name.index,
            host=host,
            pid=int(pid) if pid.isdecimal() else 0,
            exit_code=exit_code,
            time=_number(moment),
            signal=signal_name(killed_by) if killed_by else None,
            log_path=job.log_path,
            role=name.role,
            remark=_WITHOUT_BACKUP if killed_by == signal.SIGUSR1 else "",
        )
    else:
        failure = Failure(
            rank=name.index,
            host=crash.host,
            pid=crash.pid,
            exit_code=crash.exit_code,
            time=crash.time,
            error_type=crash.type,
            message=crash.message,
            traceback=crash.traceback,
            kinds=crash.kinds,
            steps=crash.steps,
            log_path=job.log_path,
            role=name.role,
        )
    return _Task(name, failure)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return time.time()
