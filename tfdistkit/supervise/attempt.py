"""One attempt at a job: start -> observe -> decide -> act, until it is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tfdistkit.launcher.backend import Backend, WorkerHandle
from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.output.logs import LogPump
from tfdistkit.launcher.planning import plan_again
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.report.alone import all_worked_alone
from tfdistkit.report.events import EventLog
from tfdistkit.report.failures import Failure, first_cause_first, signal_name
from tfdistkit.report.names import ProcessName, listed
from tfdistkit.report.private_files import make_folder
from tfdistkit.report.progress import read_communication, read_steps
from tfdistkit.supervise.coordinated import SUSPENDED_S
from tfdistkit.supervise.decision import Action, Decision, Outcome
from tfdistkit.supervise.elastic.changes import Changes
from tfdistkit.supervise.hangs.diagnosis import diagnose
from tfdistkit.supervise.hangs.stragglers import Stragglers
from tfdistkit.supervise.hangs.watch import HangWatch
from tfdistkit.supervise.policy import decide
from tfdistkit.supervise.restarting import is_same_failure
from tfdistkit.supervise.result import History, JobResult
from tfdistkit.supervise.signals import BACKUP_SIGNALS
from tfdistkit.supervise.status import GroupStatus, WorkerStatus
from tfdistkit.supervise.stopping import BACKUP_GRACE_S, stop_workers, wait_for_end
from tfdistkit.supervise.watching import failure_of, look_at

# Poll interval for crash records, signals and deadlines; the end of a worker wakes the loop at once.
_POLL_S = 0.1
# Time to show the last output.
_OUTPUT_DEADLINE_S = 2.0
# Time for servers and workers to exit on their own after the coordinator has ended.
_LEAVE_S = 3.0

# As the command `timeout` does.
TIMED_OUT_EXIT_CODE = 124
# For a job that was stopped because a worker was suspended, or exited early.
_OTHER_EXIT_CODE = 1

_SUSPENDED = f"It had been suspended (SIGSTOP) for {SUSPENDED_S:g} s, so the launcher killed it."
_LEFT_EARLY = (
    "It exited before the coordinator. Either the script did not reach "
    'tfdistkit.strategy("parameter_server"), which does not return in a worker or server, or it lost the connection '
    "to the coordinator."
)


class Attempt:
    """The processes of one attempt, and their statuses.

    Args:
        job: The job.
        backend: Runs the processes.
        console: Shows their output.
        events: Records the events.
        signals: The signals that this process received; it grows.
        history: The history of the job over all attempts; this attempt adds to it.
        changes: Observes whether the number of workers should change.
    """

    def __init__(
        self,
        job: JobSpec,
        backend: Backend,
        console: Console,
        events: EventLog,
        signals: Sequence[int],
        history: History,
        changes: Changes,
    ) -> None:
        self._job, self._backend, self._console, self._events = job, backend, console, events
        self._signals, self._history, self._changes = signals, history, changes
        self._pumps: list[LogPump] = []
        # All of these are indexed in the order of the processes.
        self._specs: Sequence[ProcessSpec] = ()
        self._replaced: dict[int, int] = {}
        # The failure that a worker was last restarted after, and the time of the restart.
        self._restarted_after: dict[int, tuple[Failure, float]] = {}
        self._workers: list[WorkerHandle] = []
        self._statuses: list[WorkerStatus] = []
        self._remarks: dict[int, str] = {}
        # Those that got SIGKILL and did not end: blocked in the kernel.
        self._killed: list[WorkerHandle] = []
        self._is_closed = False
        self._communication: dict[str, Any] = {}
        self._hangs = HangWatch(job.hang_timeout_s)
        self._stragglers = Stragglers((), ())

    def to_the_end(self, processes: Sequence[ProcessSpec]) -> tuple[JobResult, bool]:
        """Runs the attempt.

        Args:
            processes: The processes to start.

        Returns:
            The result, and whether to start the job again.
        """
        self._start(processes)
        while not (decision := decide(self._observe())).ends_attempt:
            for index in decision.indices:
                self._act_on(index, decision.action)
            self._changes.look(self._workers)
            self._backend.wait(_POLL_S)
        received = len(self._signals)
        result = self._end(decision)
        goes_on = decision.action in (Action.RESTART, Action.RESIZE)
        if goes_on and len(self._signals) > received:
            number = self._signals[received]
            return replace(result, outcome=Outcome.INTERRUPTED, exit_code=128 + number), False
        return result, goes_on

    def leave_nothing(self) -> None:
        """Stops all remaining processes; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        remaining = [worker for worker in self._workers if worker not in self._killed and not worker.is_gone()]
        if remaining:
            self._events.add("stopping", signal="SIGTERM")
            stop_workers(remaining, signal.SIGTERM)
        self._backend.close()
        self._report_unkilled()
        for pump in self._pumps:
            pump.finish(_OUTPUT_DEADLINE_S)

    def _report_unkilled(self) -> None:
        """Reports processes of this machine that SIGKILL does not end."""
        unkilled = [worker for worker in self._killed if self._job.hosts is None and not worker.is_gone()]
        if unkilled:
            self._events.add("unkilled", pids=[worker.pid for worker in unkilled])
            who, pids = listed([worker.spec.name for worker in unkilled]), ", ".join(str(one.pid) for one in unkilled)
            why = "blocked in the kernel, until the disk or the network answers"
            self._console.note(f"tfdistkit: {who} did not end after SIGKILL (pid {pids}): {why}.")

    def _start(self, processes: Sequence[ProcessSpec]) -> None:
        self._specs = processes
        self._stragglers = Stragglers([one.name for one in processes], [one.folder for one in processes])
        self._console.begin_attempt([spec.name.label for spec in processes])
        self._changes.begin_attempt(len(processes))
        pump = LogPump(self._console)
        for index, spec in enumerate(processes):
            worker = self._backend.start(spec)
            self._workers.append(worker)
            self._statuses.append(WorkerStatus(spec.name.index, role=spec.name.role))
            pump.add(index, worker)
            self._log_event("worker_started", worker, host=worker.host, pid=worker.pid)
        self._pumps.append(pump)
        pump.start()

    def _observe(self) -> GroupStatus:
        for index, (worker, before) in enumerate(zip(self._workers, self._statuses, strict=True)):
            if not before.has_ended:
                self._statuses[index] = look_at(worker, before)
                if not worker.spec.name.index:
                    self._log_communication(worker)
                if self._statuses[index].has_ended:
                    self._log_event("worker_ended", worker, exit_code=self._statuses[index].exit_code)
        self._stragglers.look(time.monotonic())
        now, running = time.monotonic(), [self._workers[index].spec.folder for index in self._running()]
        return GroupStatus(
            workers=tuple(self._statuses),
            now=now,
            elapsed_s=self._history.elapsed_s,
            timeout_s=self._job.timeout_s,
            signals=(*self._signals, *self._changes.signals),
            patience_s=self._backend.patience_s,
            restarts_left=self._history.restarts_left,
            restart_wait_s=self._history.backoff.wait_s,
            is_elastic=self._changes.is_elastic,
            is_asked=self._changes.is_asked,
            is_hung=self._hangs.look(running, now),
        )

    def _running(self) -> list[int]:
        return [index for index, one in enumerate(self._statuses) if not one.has_ended and one.crash is None]

    def _act_on(self, index: int, action: Action) -> None:
        """Kills, replaces or gives up one worker, while its peers keep running."""
        worker = self._workers[index]
        if action is Action.KILL:
            self._remarks[index] = _SUSPENDED
            self._log_event("worker_killed", worker, reason="suspended")
        # Also the child processes of a worker that has ended: they may hold its port.
        stop_workers([worker], signal.SIGKILL)
        if action is Action.KILL:
            return
        failure = failure_of(worker, self._statuses[index], self._remarks.pop(index, ""))
        before, started = self._restarted_after.get(index, (None, 0.0))
        is_repeated = is_same_failure(before, failure, time.monotonic() - started)
        if action is Action.REPLACE and not is_repeated:
            self._restarted_after[index] = failure, time.monotonic()
            self._replace(index, failure)
        else:
            self._statuses[index] = replace(self._statuses[index], is_given_up=True)
            self._log_event("worker_given_up", worker)
            again = "it failed in the same place again, so it is not restarted, and " if is_repeated else ""
            self._report_incident(failure, f"{again}the job continues without it")

    def _replace(self, index: int, failure: Failure) -> None:
        count = self._history.count_restart()
        self._report_incident(failure, f"it restarts at the same address ({count})")
        self._replaced[index] = self._replaced.get(index, 0) + 1
        spec = plan_again(self._specs[index], self._replaced[index])
        make_folder(spec.folder)
        worker = self._workers[index] = self._backend.start(spec)
        self._statuses[index] = WorkerStatus(spec.name.index, role=spec.name.role)
        self._log_event("worker_restarted", worker, host=worker.host, pid=worker.pid)
        pump = LogPump(self._console)
        pump.add(index, worker)
        self._pumps.append(pump)
        pump.start()

    def _report_incident(self, failure: Failure, answer: str) -> None:
        """Reports a failure that the job survives, now and in the summary at the end."""
        after = f"after {self._history.elapsed_s:.1f} s"
        where = f"host {failure.host}, pid {failure.pid}"
        what = f"{failure.name} {failure.headline} ({where}, exit code {failure.exit_code})"
        incident = f"{what} {after}: {answer}."
        self._history.incidents.append(incident)
        rest = " ".join(part for part in (failure.remark, f"Its log: {failure.log_path}") if part)
        self._console.note(f"tfdistkit: {incident} {rest}")

    def _end(self, decision: Decision) -> JobResult:
        assert decision.outcome is not None
        elapsed_s = self._history.elapsed_s
        is_planned = decision.action is Action.RESIZE
        ends_well = is_planned or decision.action is Action.FINISH
        failures = () if ends_well else self._causes(decision.indices)
        hang = self._diagnose(decision, failures)
        suspended = [worker.spec.name for worker in self._workers if worker.is_suspended() and not ends_well]
        coordinator = self._observe().coordinator
        if coordinator is not None and coordinator.has_ended and decision.action is not Action.RESTART:
            wait_for_end(self._workers, _LEAVE_S, should_stop=lambda: bool(self._signals))
            self._observe()
        if is_planned:
            self._wait_for_backups()
        stopped = [self._workers[index].spec.name for index in self._running()]
        if not ends_well:
            self._stop(decision, [str(name) for name in stopped])
        self.leave_nothing()
        folders = tuple(worker.spec.folder for worker in self._workers)
        worked_alone = ends_well and not is_planned and all_worked_alone(folders)
        if worked_alone:
            self._events.add("worked_alone")
        return JobResult(
            outcome=decision.outcome,
            exit_code=_exit_code(decision, failures),
            failures=failures,
            suspended=tuple(suspended),
            stopped=tuple(stopped),
            elapsed_s=elapsed_s,
            attempt=self._history.attempt,
            incidents=tuple(self._history.incidents),
            folders=folders,
            worked_alone=worked_alone,
            left=self._left_early(failures),
            incomplete=tuple(problem for pump in self._pumps for problem in pump.incomplete),
            unshown_bytes=sum(pump.unshown_bytes for pump in self._pumps),
            is_planned=is_planned,
            hang=hang,
            straggler=self._straggler(),
        )

    def _wait_for_backups(self) -> None:
        """Waits until the workers that were asked for a backup have ended, or until a signal."""
        deadline = time.monotonic() + BACKUP_GRACE_S
        while any(worker.exit_code() is None for worker in self._workers) and time.monotonic() < deadline:
            if self._signals:
                break
            self._backend.wait(_POLL_S)
        self._observe()

    def _straggler(self) -> str:
        found = self._stragglers.found()
        if found is None:
            return ""
        phases = {phase: round(share, 3) for phase, share in found.phases.items()}
        self._events.add("straggler", process=str(found.name), share=round(found.share, 3), phases=phases)
        return str(found)

    def _diagnose(self, decision: Decision, failures: Sequence[Failure]) -> str:
        """Describes where the running ranks are, if the job hangs or a rank has waited for a peer for too long."""
        specs = [self._workers[index].spec for index in self._running()]
        is_seen = self._job.hosts is None or row_of(self._job.backend).watches_hosts
        if decision.outcome is not Outcome.FAILED or not is_seen or not specs:
            return ""
        if failures and not failures[0].is_collective_timeout:
            return ""
        places = diagnose(specs)
        self._events.add("hang", places=places.splitlines(), is_hung=self._hangs.is_hung)
        return places

    def _causes(self, indices: Sequence[int]) -> tuple[Failure, ...]:
        """Returns the failures so far; after a consequence, waits for its cause to become visible."""
        deadline = time.monotonic() + self._backend.blindness_s
        while True:
            self._observe()
            failures = self._failures(indices)
            is_clear = not failures or not failures[0].is_consequence
            if is_clear or self._signals or time.monotonic() > deadline:
                return failures
            self._backend.wait(_POLL_S)

    def _failures(self, indices: Sequence[int]) -> tuple[Failure, ...]:
        """Returns failures, first cause first: those that ended the attempt before those that it had survived."""
        for index in indices:
            if self._statuses[index].has_ended_well:
                self._remarks[index] = _LEFT_EARLY
        found = {
            index: failure_of(worker, status, self._remarks.get(index, ""))
            for index, (worker, status) in enumerate(zip(self._workers, self._statuses, strict=True))
            if status.has_failed or status.crash is not None or index in indices
        }
        causes = first_cause_first(found[index] for index in indices)
        if not causes or causes[0].is_consequence:
            return first_cause_first(found.values())
        rest = [index for index in found if index not in indices and not self._statuses[index].is_given_up]
        return causes + first_cause_first(found[index] for index in rest)

    def _left_early(self, failures: Sequence[Failure]) -> tuple[tuple[ProcessName, int | None], ...]:
        """Returns the processes that exited successfully, if all failures only report a lost peer."""
        if not failures or not failures[0].is_consequence or self._observe().coordinator is not None:
            return ()
        pairs = zip(self._workers, self._statuses, strict=True)
        return tuple((one.spec.name, read_steps(one.spec.folder)) for one, status in pairs if status.has_ended_well)

    def _stop(self, decision: Decision, stopped: Sequence[str]) -> None:
        name = signal_name(decision.signal)
        self._events.add("stopping", signal=name, processes=stopped)
        for pump in self._pumps:
            pump.let_go()
        if decision.outcome is Outcome.INTERRUPTED:
            self._console.note(f"tfdistkit: {name}: stopping the workers (repeat to kill them).")
        received = len(self._signals)

        def should_stop() -> bool:
            return len(self._signals) > received

        number = decision.signal
        if self._changes.is_elastic and number == signal.SIGUSR1:
            number = signal.SIGTERM  # workers that are not in `fit` ignore the request for a backup
        if decision.outcome is Outcome.INTERRUPTED and number in BACKUP_SIGNALS:
            # Only the coordinator makes backups, and it needs the servers for that.
            coordinators = [worker for worker in self._workers if worker.spec.name.role == "chief"]
            stop_workers(coordinators or self._workers, number, should_stop, BACKUP_GRACE_S)
        self._killed = stop_workers(self._workers, number, should_stop)

    def _log_event(self, event: str, worker: WorkerHandle, **fields: object) -> None:
        name = worker.spec.name
        self._events.add(event, process=str(name), role=name.role, rank=name.index, **fields)

    def _log_communication(self, worker: WorkerHandle) -> None:
        """Logs the communication of a worker, which `StepTimer` on the chief wrote at the end of an epoch."""
        facts = read_communication(worker.spec.folder)
        if facts and facts != self._communication:
            self._communication = facts
            self._log_event("communication", worker, **facts)


def _exit_code(decision: Decision, failures: Sequence[Failure]) -> int:
    if decision.outcome is Outcome.FAILED:
        return (failures[0].exit_code if failures else 0) or _OTHER_EXIT_CODE
    if decision.outcome is Outcome.INTERRUPTED:
        return 128 + decision.signal
    return TIMED_OUT_EXIT_CODE if decision.outcome is Outcome.TIMED_OUT else 0
