"""What the supervisor sees of a job at one moment: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tfdistkit.report.crashes import CrashRecord


@dataclass(frozen=True)
class WorkerStatus:
    """One worker.

    Args:
        rank: Its number in the job.
        exit_code: None while it runs; -N when signal N killed it.
        ended_at: When it was seen to have ended, in seconds since the epoch; None while it runs.
        alive_at: When it was last seen alive.
        crash: What it wrote about its own exception. It can be there while the process still runs: the
            interpreter may be shutting down.
        suspended_at: Since when it has been suspended (SIGSTOP); None while it works.
    """

    rank: int
    exit_code: int | None = None
    ended_at: float | None = None
    alive_at: float = 0.0
    crash: CrashRecord | None = None
    suspended_at: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self.has_ended and (self.exit_code != 0 or self.crash is not None)


@dataclass(frozen=True)
class GroupStatus:
    """The whole job.

    Args:
        workers: In rank order.
        now: Seconds since the epoch.
        elapsed_s: Since the start of the job.
        timeout_s: How long the job may take; None for as long as it takes.
        signals: The signals that the launcher was sent to end the job, in order.
        patience_s: How long a suspended worker is waited for; None where the others notice it by themselves.
    """

    workers: tuple[WorkerStatus, ...]
    now: float
    elapsed_s: float
    timeout_s: float | None = None
    signals: tuple[int, ...] = ()
    patience_s: float | None = None
