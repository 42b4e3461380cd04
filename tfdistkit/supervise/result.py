"""How a job came out, and what went wrong on the way."""

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
    """How a job came out.

    Args:
        outcome: In one word.
        exit_code: What the launcher ends with.
        failures: The workers that failed by themselves, first cause first.
        suspended: Those that were found suspended (SIGSTOP) when the job failed.
        stopped: Those that the launcher had to stop.
        elapsed_s: How long the job took until its outcome was clear.
        attempt: How often the whole job had been started again.
        incidents: Failures that it went on after, a sentence each.
        folders: The folders of its processes in the last attempt, in their order.
        worked_alone: Whether it ended well, but no process asked for a strategy.
        left: Those that had ended well while the others went on, and after how many steps as far as that is known:
            where all others only say that somebody is gone, they are why.
        incomplete: The logs that do not hold all output, and why.
        unshown_bytes: How much of the output only the logs hold: nobody read it while the job was being stopped.
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


@dataclass
class History:
    """What happened to a job so far, over all attempts.

    Args:
        max_restarts: How often processes may be started again.
        restarts: How often they were: the whole job, or a worker of it.
        attempt: How often it was the whole job.
        incidents: Failures that the job went on after, a sentence each.
        started: When it began, by `time.monotonic`.
        backoff: How long the next restart waits.
    """

    max_restarts: int
    restarts: int = 0
    attempt: int = 0
    incidents: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def restarts_left(self) -> int:
        return self.max_restarts - self.restarts

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def count_restart(self) -> str:
        """Counts one restart; returns which one it is: `restart 1 of 3`."""
        self.restarts += 1
        self.backoff.count()
        return f"restart {self.restarts} of {self.max_restarts}"
