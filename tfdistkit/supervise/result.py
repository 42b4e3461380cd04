"""The result of a job, and the failures that it survived."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from tfdistkit.report.failures import Failure
from tfdistkit.report.names import ProcessName
from tfdistkit.supervise.decision import Outcome
from tfdistkit.supervise.restarting import Backoff


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    Args:
        outcome: Whether it succeeded, failed, was interrupted or timed out.
        exit_code: The exit code of the launcher.
        failures: The processes that failed on their own, first cause first.
        suspended: The processes that were suspended (SIGSTOP) when the job failed.
        stopped: The processes that the launcher stopped.
        elapsed_s: The time from the start until the outcome was decided, in seconds.
        attempt: The number of restarts of the whole job.
        incidents: The failures that the job survived, one sentence each.
        folders: The folders of its processes in the last attempt, in order.
        worked_alone: Whether it succeeded, but no process asked for a strategy.
        left: The processes that exited successfully before their peers, with their number of steps if known: the
            cause when all failures only report a lost peer.
        incomplete: The incomplete logs, with the reason.
        is_planned: Whether all workers ended after a backup, so that their number can change.
        hang: Where each rank was when the job hung, or when a rank had waited for its peers for too long; else empty.
        straggler: A sentence about the rank that the others waited for; empty without a clear one.
        unshown_bytes: The number of bytes that are only in the logs: the reader stalled while the job was stopped.
    """

    outcome: Outcome
    exit_code: int
    failures: tuple[Failure, ...] = ()
    suspended: tuple[ProcessName, ...] = ()
    stopped: tuple[ProcessName, ...] = ()
    elapsed_s: float = 0.0
    attempt: int = 0
    incidents: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    worked_alone: bool = False
    left: tuple[tuple[ProcessName, int | None], ...] = ()
    incomplete: tuple[str, ...] = ()
    unshown_bytes: int = 0
    is_planned: bool = False
    hang: str = ""
    straggler: str = ""


@dataclass
class History:
    """The history of a job over all attempts.

    Args:
        max_restarts: The number of restarts allowed.
        restarts: The number of restarts so far, of the whole job or of single workers.
        attempt: The number of restarts of the whole job.
        incidents: The failures that the job survived, one sentence each.
        started: The start of the job, by `time.monotonic`.
        backoff: The delay before the next restart.
        window_s: The seconds after which a restart no longer counts; None for never.
    """

    max_restarts: int
    restarts: int = 0
    attempt: int = 0
    incidents: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    backoff: Backoff = field(default_factory=Backoff)
    window_s: float | None = None
    _times: list[float] = field(default_factory=list)

    @property
    def restarts_left(self) -> int:
        return self.max_restarts - self._counting

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def count_restart(self) -> str:
        """Counts one restart; returns its description: `restart 1 of 3`, or `restart 1 of 3 within 600 s`."""
        self.restarts += 1
        self._times.append(time.monotonic())
        self.backoff.count()
        within = "" if self.window_s is None else f" within {self.window_s:g} s"
        return f"restart {self._counting} of {self.max_restarts}{within}"

    @property
    def _counting(self) -> int:
        """The number of restarts that count against the maximum."""
        window_s, now = self.window_s, time.monotonic()
        return self.restarts if window_s is None else sum(now - moment < window_s for moment in self._times)
