"""What the supervisor sees of a job at one moment: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from tfdistkit.report.crashes import CrashRecord

# A worker with an unhandled exception may take this long to shut its interpreter down. TensorFlow can hang there,
# waiting for its peers, and these can wait for the worker: then nobody would ever end.
SHUTDOWN_S = 3.0


@dataclass(frozen=True)
class WorkerStatus:
    """One process.

    Args:
        rank: Its number among those of its role.
        exit_code: None while it runs; -N when signal N killed it.
        ended_at: When it was seen to have ended, by `time.monotonic`; None while it runs.
        ended_time: The same in seconds since the epoch, which other hosts know too; a clock that is set changes it.
        alive_at: When it was last seen alive, by `time.monotonic`.
        alive_time: The same in seconds since the epoch.
        crash: What it wrote about its own exception. It can be there while the process still runs: the
            interpreter may be shutting down.
        crashed_at: When that was seen first, by `time.monotonic`.
        suspended_at: Since when it has been suspended (SIGSTOP); None while it works.
        role: `chief`, `worker` or `ps`; None in a job whose processes are all alike.
        is_given_up: Whether it failed, and the others go on without it.
    """

    rank: int
    exit_code: int | None = None
    ended_at: float | None = None
    ended_time: float | None = None
    alive_at: float = 0.0
    alive_time: float = 0.0
    crash: CrashRecord | None = None
    crashed_at: float | None = None
    suspended_at: float | None = None
    role: str | None = None
    is_given_up: bool = False

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and not well."""
        return self.has_ended and (self.exit_code != 0 or self.crash is not None)

    @property
    def has_ended_well(self) -> bool:
        return self.has_ended and not self.has_failed


@dataclass(frozen=True)
class GroupStatus:
    """The whole job.

    Args:
        workers: Its processes in their order.
        now: The time, by `time.monotonic`.
        elapsed_s: Since the start of the job.
        timeout_s: How long the job may take; None for as long as it takes.
        signals: The signals that the launcher was sent to end the job, in order.
        patience_s: How long a suspended worker is waited for; None where the others notice it by themselves.
        restarts_left: How often something may still be started again.
        restart_wait_s: For how long a worker that is to be started again alone has to wait, in seconds.
    """

    workers: tuple[WorkerStatus, ...]
    now: float
    elapsed_s: float
    timeout_s: float | None = None
    signals: tuple[int, ...] = ()
    patience_s: float | None = None
    restarts_left: int = 0
    restart_wait_s: float = 0.0

    @property
    def coordinator(self) -> WorkerStatus | None:
        """The chief, where processes have roles; None where they are all alike."""
        return next((worker for worker in self.workers if worker.role == "chief"), None)

    @property
    def is_out_of_time(self) -> bool:
        return self.timeout_s is not None and self.elapsed_s >= self.timeout_s

    @property
    def may_restart(self) -> bool:
        """Whether a failure can be answered by a new start: never when the user or the clock ends the job."""
        return self.restarts_left > 0 and not self.signals and not self.is_out_of_time

    def is_broken(self, worker: WorkerStatus) -> bool:
        """Whether a worker failed, or hangs in its shutdown after an exception."""
        hangs = worker.crashed_at is not None and self.now - worker.crashed_at > SHUTDOWN_S
        # A single worker makes nobody wait: it may take its time, as under plain Python.
        return worker.has_failed or (hangs and len(self.workers) > 1)

    def is_due(self, worker: WorkerStatus) -> bool:
        """Whether a broken worker has waited long enough to be started again."""
        since = worker.ended_at if worker.ended_at is not None else worker.crashed_at
        return since is None or self.now - since >= self.restart_wait_s

    def is_suspended(self, worker: WorkerStatus, patience_s: float) -> bool:
        """Whether a worker has been suspended for longer than that."""
        return worker.suspended_at is not None and self.now - worker.suspended_at > patience_s
