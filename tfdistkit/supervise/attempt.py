"""One attempt at a job: start -> look -> decide -> act, until it is over."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from tfdistkit.launcher.backend import Backend, WorkerHandle
from tfdistkit.launcher.output.console import Console
from tfdistkit.launcher.output.logs import LogPump
from tfdistkit.launcher.planning import plan_again
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.report.alone import all_worked_alone
from tfdistkit.report.events import EventLog
from tfdistkit.report.failures import Failure, first_cause_first, signal_name
from tfdistkit.report.names import ProcessName
from tfdistkit.report.private_files import make_folder
from tfdistkit.report.progress import read_steps
from tfdistkit.supervise.coordinated import SUSPENDED_S
from tfdistkit.supervise.decision import Action, Decision, Outcome
from tfdistkit.supervise.policy import decide
from tfdistkit.supervise.restarting import is_same_failure
from tfdistkit.supervise.result import History, JobResult
from tfdistkit.supervise.signals import BACKUP_SIGNALS
from tfdistkit.supervise.status import GroupStatus, WorkerStatus
from tfdistkit.supervise.stopping import BACKUP_GRACE_S, stop_workers, wait_for_end
from tfdistkit.supervise.watching import failure_of, look_at

# How often crash records, signals and deadlines are looked at; the end of a worker is seen at once.
_POLL_S = 0.1
# How long the last output may take to be shown.
_OUTPUT_DEADLINE_S = 2.0
# How long servers and workers may take to end by themselves when the coordinator has ended.
_LEAVE_S = 3.0

# As the command `timeout` does.
TIMED_OUT_EXIT_CODE = 124
# Nobody failed: the job was ended because a worker was suspended, or had left.
_OTHER_EXIT_CODE = 1

_SUSPENDED = f"It had been suspended (SIGSTOP) for {SUSPENDED_S:g} s, so the launcher killed it."
_LEFT_EARLY = (
    'It left the coordinator alone: the script never came to tfdistkit.strategy("parameter_server") there, which '
    "does not return in a worker or server, or it took the coordinator for dead."
)


class Attempt:
    """The processes of one attempt, and what was seen of them.

    Args:
        job: What the user wants.
        backend: Where the processes run.
        console: Where their output is shown.
        events: Where it is written down what happens.
        signals: The signals that this process was sent; it grows.
        history: What happened to the job before, and happens to it here.
    """

    def __init__(
        self,
        job: JobSpec,
        backend: Backend,
        console: Console,
        events: EventLog,
        signals: Sequence[int],
        history: History,
    ) -> None:
        self._job, self._backend, self._console, self._events = job, backend, console, events
        self._signals, self._history = signals, history
        self._pumps: list[LogPump] = []
        # By their places in the order of the processes, all of them.
        self._first: Sequence[ProcessSpec] = ()
        self._replaced: dict[int, int] = {}
        # The failures that a worker was started again after, and when that was.
        self._answered: dict[int, tuple[Failure, float]] = {}
        self._workers: list[WorkerHandle] = []
        self._seen: list[WorkerStatus] = []
        self._remarks: dict[int, str] = {}
        self._has_left = False

    def to_the_end(self, processes: Sequence[ProcessSpec]) -> tuple[JobResult, bool]:
        """Runs the attempt.

        Args:
            processes: What to start.

        Returns:
            How it came out, and whether the job is to be started again.
        """
        self._start(processes)
        while (decision := decide(self._look())).action not in (Action.FINISH, Action.STOP, Action.RESTART):
            for place in decision.who:
                self._care_for(place, decision.action)
            self._backend.wait(_POLL_S)
        received = len(self._signals)
        result = self._end(decision)
        if decision.action is Action.RESTART and len(self._signals) > received:
            number = self._signals[received]
            return replace(result, outcome=Outcome.INTERRUPTED, exit_code=128 + number), False
        return result, decision.action is Action.RESTART

    def leave_nothing(self) -> None:
        """Ends what is still there; a second call does nothing."""
        if self._has_left:
            return
        self._has_left = True
        if any(not worker.is_gone() for worker in self._workers):
            self._events.add("stopping", signal="SIGTERM")
            stop_workers(self._workers, signal.SIGTERM)
        self._backend.close()
        for pump in self._pumps:
            pump.finish(_OUTPUT_DEADLINE_S)

    def _start(self, processes: Sequence[ProcessSpec]) -> None:
        self._first = processes
        self._console.begin_attempt()
        pump = LogPump(self._console)
        for place, spec in enumerate(processes):
            worker = self._backend.start(spec)
            self._workers.append(worker)
            self._seen.append(WorkerStatus(spec.name.index, role=spec.name.role))
            pump.add(place, worker)
            self._tell("worker_started", worker, host=worker.host, pid=worker.pid)
        self._pumps.append(pump)
        pump.start()

    def _look(self) -> GroupStatus:
        for place, (worker, before) in enumerate(zip(self._workers, self._seen, strict=True)):
            if not before.has_ended:
                self._seen[place] = look_at(worker, before)
                if self._seen[place].has_ended:
                    self._tell("worker_ended", worker, exit_code=self._seen[place].exit_code)
        return GroupStatus(
            workers=tuple(self._seen),
            now=time.monotonic(),
            elapsed_s=self._history.elapsed_s,
            timeout_s=self._job.timeout_s,
            signals=tuple(self._signals),
            patience_s=self._backend.patience_s,
            restarts_left=self._history.restarts_left,
            restart_wait_s=self._history.backoff.wait_s,
        )

    def _care_for(self, place: int, action: Action) -> None:
        """Does what concerns one worker only, while the others go on."""
        worker = self._workers[place]
        if action is Action.KILL:
            self._remarks[place] = _SUSPENDED
            self._tell("worker_killed", worker, reason="suspended")
        # Also what it left behind when it has ended: it may hold the port.
        stop_workers([worker], signal.SIGKILL)
        if action is Action.KILL:
            return
        failure = failure_of(worker, self._seen[place], self._remarks.pop(place, ""))
        before, started = self._answered.get(place, (None, 0.0))
        is_hopeless = is_same_failure(before, failure, time.monotonic() - started)
        if action is Action.REPLACE and not is_hopeless:
            self._answered[place] = failure, time.monotonic()
            self._replace(place, failure)
        else:
            self._seen[place] = replace(self._seen[place], is_given_up=True)
            self._tell("worker_given_up", worker)
            again = "it failed in the same place again, so it is not started again, and " if is_hopeless else ""
            self._remember(failure, f"{again}the others go on without it")

    def _replace(self, place: int, failure: Failure) -> None:
        count = self._history.count_restart()
        self._remember(failure, f"it starts again at its address ({count})")
        self._replaced[place] = self._replaced.get(place, 0) + 1
        spec = plan_again(self._first[place], self._replaced[place])
        make_folder(spec.folder)
        worker = self._workers[place] = self._backend.start(spec)
        self._seen[place] = WorkerStatus(spec.name.index, role=spec.name.role)
        self._tell("worker_restarted", worker, host=worker.host, pid=worker.pid)
        pump = LogPump(self._console)
        pump.add(place, worker)
        self._pumps.append(pump)
        pump.start()

    def _remember(self, failure: Failure, answer: str) -> None:
        """Tells a failure that the job goes on after, now and in the report at the end."""
        after = f"after {self._history.elapsed_s:.1f} s"
        where = f"host {failure.host}, pid {failure.pid}"
        what = f"{failure.name} {failure.headline} ({where}, exit code {failure.exit_code})"
        told = f"{what} {after}: {answer}."
        self._history.incidents.append(told)
        rest = " ".join(part for part in (failure.remark, f"Its log: {failure.log_path}") if part)
        self._console.note(f"tfdistkit: {told} {rest}")

    def _end(self, decision: Decision) -> JobResult:
        assert decision.outcome is not None
        elapsed_s = self._history.elapsed_s
        ends_well = decision.action is Action.FINISH
        failures = () if ends_well else self._causes(decision.who)
        suspended = [worker.spec.name for worker in self._workers if worker.is_suspended() and not ends_well]
        coordinator = self._look().coordinator
        if coordinator is not None and coordinator.has_ended and decision.action is not Action.RESTART:
            wait_for_end(self._workers, _LEAVE_S, should_stop=lambda: bool(self._signals))
            self._look()
        running = [place for place, seen in enumerate(self._seen) if not seen.has_ended and seen.crash is None]
        stopped = [self._workers[place].spec.name for place in running]
        if not ends_well:
            self._stop(decision, [str(name) for name in stopped])
        self.leave_nothing()
        folders = tuple(worker.spec.folder for worker in self._workers)
        worked_alone = ends_well and all_worked_alone(folders)
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
            left=self._left(failures),
            incomplete=tuple(problem for pump in self._pumps for problem in pump.incomplete),
            unshown_bytes=sum(pump.unshown_bytes for pump in self._pumps),
        )

    def _causes(self, who: Sequence[int]) -> tuple[Failure, ...]:
        """The failures that are there now; the cause may come up while the consequence is looked at."""
        deadline = time.monotonic() + self._backend.blindness_s
        while True:
            self._look()
            failures = self._failures(who)
            is_clear = not failures or not failures[0].is_consequence
            if is_clear or self._signals or time.monotonic() > deadline:
                return failures
            self._backend.wait(_POLL_S)

    def _failures(self, who: Sequence[int]) -> tuple[Failure, ...]:
        """First cause first: those that ended the attempt, before those that the others had gone on without."""
        for place in who:
            if self._seen[place].has_ended_well:
                self._remarks[place] = _LEFT_EARLY
        found = {
            place: failure_of(worker, seen, self._remarks.get(place, ""))
            for place, (worker, seen) in enumerate(zip(self._workers, self._seen, strict=True))
            if seen.has_failed or seen.crash is not None or place in who
        }
        guilty = first_cause_first(found[place] for place in who)
        if not guilty or guilty[0].is_consequence:
            return first_cause_first(found.values())
        rest = [place for place in found if place not in who and not self._seen[place].is_given_up]
        return guilty + first_cause_first(found[place] for place in rest)

    def _left(self, failures: Sequence[Failure]) -> tuple[tuple[ProcessName, int | None], ...]:
        """Those that ended well before the others said that somebody is gone."""
        if not failures or not failures[0].is_consequence or self._look().coordinator is not None:
            return ()
        pairs = zip(self._workers, self._seen, strict=True)
        return tuple((one.spec.name, read_steps(one.spec.folder)) for one, seen in pairs if seen.has_ended_well)

    def _stop(self, decision: Decision, stopped: Sequence[str]) -> None:
        name = signal_name(decision.signal)
        self._events.add("stopping", signal=name, processes=stopped)
        for pump in self._pumps:
            pump.let_go()
        if decision.outcome is Outcome.INTERRUPTED:
            self._console.note(f"tfdistkit: {name}: stopping the workers (once more to kill them at once).")
        received = len(self._signals)

        def should_stop() -> bool:
            return len(self._signals) > received

        if decision.outcome is Outcome.INTERRUPTED and decision.signal in BACKUP_SIGNALS:
            # The coordinator alone can make a backup, and needs the servers for it.
            coordinators = [worker for worker in self._workers if worker.spec.name.role == "chief"]
            stop_workers(coordinators or self._workers, decision.signal, should_stop, BACKUP_GRACE_S)
        stop_workers(self._workers, decision.signal, should_stop)

    def _tell(self, event: str, worker: WorkerHandle, **fields: object) -> None:
        name = worker.spec.name
        self._events.add(event, process=str(name), role=name.role, rank=name.index, **fields)


def _exit_code(decision: Decision, failures: Sequence[Failure]) -> int:
    if decision.outcome is Outcome.FAILED:
        return (failures[0].exit_code if failures else 0) or _OTHER_EXIT_CODE
    if decision.outcome is Outcome.INTERRUPTED:
        return 128 + decision.signal
    return TIMED_OUT_EXIT_CODE if decision.outcome is Outcome.TIMED_OUT else 0
