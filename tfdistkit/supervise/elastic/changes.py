"""Change the number of workers of a running job: ask all ranks for a backup, answer a loss, start the next attempt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.launcher.backend import NoRoomError, WorkerHandle
from tfdistkit.launcher.preparing import Prepared, prepare_attempt
from tfdistkit.launcher.spec import JobSpec, ProcessSpec
from tfdistkit.launcher.ssh.problems import HostsNotReady
from tfdistkit.report.events import EventLog
from tfdistkit.report.names import listed
from tfdistkit.report.summary import describe_run
from tfdistkit.supervise.elastic.losses import ASKING, asked_itself, lost_workers, unreachable_hosts
from tfdistkit.supervise.elastic.room import Room
from tfdistkit.supervise.result import History, JobResult

# Workers that are not in `fit` ignore the signal that asks for a backup, so it is sent again.
_ASK_EVERY_S = 5.0
# After this time without a backup the user is told what the ranks may be doing.
_SLOW_S = 60.0
# Losses in a row, each soon after the start of the workers, after which the job is given up.
_QUICK_S, _MOST_QUICK = 60.0, 3
_POLL_S = 0.05


class Changes:
    """Manages the changes of an elastic job; for a fixed number of workers, preemption notices only.

    Args:
        job: The job as the user requested it.
        note: Shows a message to the user.
    """

    def __init__(self, job: JobSpec, note: Callable[[str], None]):
        self._job, self._elastic = job, job.elastic
        self._say = note
        self._room = Room(job, lambda text: self._say(text))
        self._history: History | None = None
        self._events: EventLog | None = None
        self._size = job.world_size
        self._started = time.monotonic()
        self._asked_at: float | None = None
        self._first_asked_at = 0.0
        self._is_slow_told = self._is_notice_told = False
        self._quick = 0
        # Hosts on which the job has trained.
        self._proven: frozenset[str] = frozenset()
        # The loss that the next attempt answers.
        self._incident, self._is_change = "", False

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self._elastic is not None

    @property
    def timeout_s(self) -> float | None:
        """The time limit of the whole job, in seconds."""
        return self._job.timeout_s

    @property
    def is_asked(self) -> bool:
        """Whether the workers of this attempt were asked to make a backup and end."""
        return self._asked_at is not None

    @property
    def signals(self) -> tuple[int, ...]:
        """The signals that end the job because its preemption is announced."""
        return self._room.signals

    def begin_job(self, note: Callable[[str], None], events: EventLog, history: History) -> None:
        """Sets the history and the event log, once they exist."""
        self._say, self._events, self._history = note, events, history

    def begin_attempt(self, size: int) -> None:
        """Starts to observe an attempt.

        Args:
            size: Its number of workers.
        """
        self._started, self._size = time.monotonic(), size
        self._asked_at, self._is_slow_told = None, False

    def look(self, workers: Sequence[WorkerHandle]) -> None:
        """Asks the workers for a backup if their number should change; never waits.

        Args:
            workers: The workers.
        """
        self._room.poll()
        self._tell_notice()
        now = time.monotonic()
        if self._elastic is None or self.signals or not (reason := self._reason(now)):
            return
        if self._asked_at is None:
            self._first_asked_at = now
            self._say(f"tfdistkit: {reason}: all ranks are asked for a backup.")
            self._add_event("backup_requested", reason=reason)
        if self._asked_at is None or now - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = now
            for worker in workers:
                worker.send_signal(ASKING)
        if not self._is_slow_told and now - self._first_asked_at > _SLOW_S:
            self._is_slow_told = True
            self._say(
                f"tfdistkit: no rank has made a backup within {_SLOW_S:g} s: `fit` with BackupAndResume has not begun, "
                "or a step takes longer. They are asked again until one has."
            )

    def answers(self, result: JobResult, processes: Sequence[ProcessSpec]) -> bool:
        """Answers the end of an attempt by a change, if it is not a failure of the script.

        Args:
            result: The result of the attempt.
            processes: Its processes.

        Returns:
            Whether the job goes on without counting a restart.
        """
        if self._elastic is None:
            return False
        self._incident, self._is_change = "", True
        newcomers = self._newcomers(result, processes)
        if result.is_planned or asked_itself(result):
            self._quick = 0
            return True
        lost = lost_workers(result)
        self._is_change = bool(lost)
        if not lost:
            return self._answers_newcomer(result, processes, newcomers)
        self._record(result, [name.index for name in lost], processes)
        refusal = self._refusal()
        if refusal:
            self._say(f"tfdistkit: {refusal}")
            self._room.members.forgive()
            self._is_change = False
            return False
        report = describe_run(result.failures, suspended=result.suspended, stopped=result.stopped)
        self._say(f"tfdistkit: lost {listed(lost)} after {result.elapsed_s:.1f} s:\n{report}")
        cause = f"{result.failures[0].name} {result.failures[0].headline}" if result.failures else listed(lost)
        self._incident = f"{cause} after {result.elapsed_s:.1f} s"
        return True

    def prepare(self, attempt: int, should_stop: Callable[[], bool] = lambda: False) -> tuple[JobSpec, Prepared]:
        """Prepares an attempt with as many workers as fit on the hosts; waits while fewer than the minimum fit.

        Args:
            attempt: The number of earlier attempts.
            should_stop: Whether to stop waiting.

        Returns:
            The job as it is now, and the attempt.

        Raises:
            TfdistkitError: if too few workers fit until the timeout, or a host fails its preflight check.
        """
        if self._elastic is None:
            return self._job, prepare_attempt(self._job, attempt, should_stop)
        self._room.require_hosts(should_stop)
        deadline = time.monotonic() + self._elastic.wait_s
        while True:
            self._wait_for_room(should_stop, self._elastic.wait_s)
            job = self._room.job_now()
            try:
                prepared = prepare_attempt(job, attempt, should_stop)
            except HostsNotReady as problem:
                if should_stop() or (not attempt and self._room.is_fixed):
                    raise
                self._say(f"tfdistkit: {problem}")
                self._leave_out(list(problem.problems))
                continue
            except NoRoomError as problem:
                # Other jobs took the room, or a node died meanwhile.
                if should_stop() or self._room.is_fixed or time.monotonic() >= deadline:
                    raise
                self._say(f"tfdistkit: {problem}")
                self._room.require_hosts(should_stop)
                continue
            self._room.settle(prepared.nodes)
            if attempt:
                self._announce(job, prepared.nodes)
            return job, prepared

    def close(self) -> None:
        """Ends the runs of the user's commands."""
        self._room.close()

    def _reason(self, now: float) -> str:
        """Returns why the number of workers should change now; empty if it should not."""
        assert self._elastic is not None
        size = self._room.members.world_size(now)
        if self._room.is_urgent():
            where = f"preemption notice from {self._room.notice.source}" if self._room.notice else "hosts are leaving"
            return f"{where}, and there is room for {_workers(size)}"
        if size > self._size and now - self._started >= self._elastic.cool_down_s:
            return f"there is room for {_workers(size)} instead of {self._size}"
        return ""

    def _tell_notice(self) -> None:
        notice = self._room.notice
        if notice is not None and self.signals and not self._is_notice_told:
            self._say(f"tfdistkit: preemption notice from {notice.source}: all ranks make a backup and end.")
            self._add_event("preemption_notice", source=notice.source, hosts=sorted(notice.hosts))
            self._is_notice_told = True

    def _newcomers(self, result: JobResult, processes: Sequence[ProcessSpec]) -> frozenset[str]:
        """Returns the hosts that this attempt has used first; keeps those that have worked, and those of the start."""
        used = frozenset(self._room.name_of(process) for process in processes)
        new = used - self._proven if self._proven else frozenset()
        if not self._proven or result.is_planned or time.monotonic() - self._started >= _QUICK_S:
            self._proven |= used
        return new

    def _answers_newcomer(self, result: JobResult, processes: Sequence[ProcessSpec], new: frozenset[str]) -> bool:
        """Leaves out a new host on which a rank failed soon after the start: the job could train before it came."""
        first = result.failures[0] if result.failures else None
        if first is None or first.is_consequence or time.monotonic() - self._started >= _QUICK_S:
            return False
        host = self._room.name_of(processes[first.rank])
        if host not in new:
            return False
        report = describe_run(result.failures, suspended=result.suspended, stopped=result.stopped)
        self._say(f"tfdistkit: {first.name} failed on the new host {host} after {result.elapsed_s:.1f} s:\n{report}")
        self._leave_out([host])
        self._incident = f"{first.name} {first.headline} after {result.elapsed_s:.1f} s"
        self._is_change = True
        return True

    def _record(self, result: JobResult, ranks: Sequence[int], processes: Sequence[ProcessSpec]) -> None:
        """Records lost workers by host, and whether they were lost soon after the start."""
        unreachable = unreachable_hosts(result.failures)
        hosts = Counter(self._room.name_of(processes[rank]) for rank in ranks)
        lost = () if self._room.tells_life else [processes[rank] for rank in ranks if rank in unreachable]
        gone = {self._room.name_of(process) for process in lost}
        now = time.monotonic()
        for host, workers in hosts.items():
            self._room.members.lose(host, workers, now, is_unreachable=host in gone)
        self._quick = self._quick + 1 if now - self._started < _QUICK_S else 0
        self._tell_left_out(hosts)

    def _refusal(self) -> str:
        """Returns why a loss cannot be answered by a change; empty if it can."""
        assert self._elastic is not None
        size = self._room.members.world_size(time.monotonic())
        if self._quick > _MOST_QUICK:
            return f"{self._quick} times in a row workers were lost within {_QUICK_S:g} s of their start: a failure."
        if size < self._elastic.least and self._room.is_fixed:
            return f"there is room for {_workers(size)}, and the job needs {self._elastic.least}: a failure."
        return ""

    def _wait_for_room(self, should_stop: Callable[[], bool], timeout_s: float) -> None:
        """Waits until the minimum number of workers fits on the hosts.

        Raises:
            UnsupportedError: after the timeout, or if the wait was interrupted.
        """
        assert self._elastic is not None
        deadline, is_told = time.monotonic() + timeout_s, False
        while (size := self._room.members.world_size(time.monotonic())) < self._elastic.least:
            what = f"There must be room for {_workers(self._elastic.least)} (MIN of -np {self._elastic})."
            if self._room.is_fixed or time.monotonic() >= deadline or should_stop() or self.signals:
                do = "Give the job more time (--wait SECONDS), or more hosts."
                raise UnsupportedError(explain(what, received=f"room for {_workers(size)}", do=do))
            if not is_told:
                wanted = f"{_workers(self._elastic.least)} (now {size})"
                self._say(f"tfdistkit: waits up to {timeout_s:g} s for room for {wanted}.")
                self._add_event("waiting_for_room", workers=size, least=self._elastic.least)
                is_told = True
            time.sleep(_POLL_S)
            self._room.poll()

    def _leave_out(self, hosts: Sequence[str]) -> None:
        for host in hosts:
            self._room.members.lose(host, 0, time.monotonic(), is_unreachable=True)
        self._tell_left_out(hosts)

    def _tell_left_out(self, hosts: Iterable[str]) -> None:
        """Tells the user which of the hosts that just failed are not used for a while."""
        left_out = self._room.members.left_out(time.monotonic())
        for host in (one for one in hosts if one in left_out):
            self._say(f"tfdistkit: host {host} failed or does not answer: left out for {left_out[host]:.0f} s.")
            self._add_event("host_left_out", host=host, seconds=round(left_out[host]))

    def _announce(self, job: JobSpec, nodes: Sequence[str]) -> None:
        """Reports the number of workers of the next attempt, and where they are."""
        if not self._is_change and job.world_size == self._size:
            return  # a restart
        change = f"{_workers(job.world_size)} instead of {self._size}"
        change = change if job.world_size != self._size else f"{_workers(self._size)} as before"
        names = nodes or [one.host for one in job.hosts.slots] if job.hosts is not None else ()
        where = f" on {', '.join(dict.fromkeys(names))}" if names else ""
        self._say(f"tfdistkit: the job continues with {change}{where}, from its last backup.")
        if self._incident and self._history is not None:
            self._history.incidents.append(f"{self._incident}: the job continued with {change}.")
        self._add_event("workers_changed", workers=job.world_size, before=self._size, after=self._incident or "a plan")

    def _add_event(self, name: str, **fields: object) -> None:
        if self._events is not None:
            self._events.add(name, **fields)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
