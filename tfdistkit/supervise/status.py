"""The status of a job at one moment: plain data."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from tfdistkit.report.crashes import CrashRecord

# Time for a worker with an unhandled exception to shut its interpreter down. TensorFlow can wait for its peers there
# while they wait for the worker: a deadlock.
SHUTDOWN_S = 3.0


@dataclass(frozen=True)
class WorkerStatus:
    """The status of one process.

    Args:
        rank: Its index within its role.
        exit_code: None while it runs; -N when signal N killed it.
        ended_at: When the launcher observed its end, by `time.monotonic`; None while it runs.
        ended_time: The same in seconds since the epoch, comparable between hosts, but not monotonic.
        alive_at: When the launcher last observed it alive, by `time.monotonic`.
        alive_time: The same in seconds since the epoch.
        crash: The crash record that it wrote. It can exist while the process still runs: the interpreter may be
            shutting down.
        crashed_at: When the launcher first observed the crash record, by `time.monotonic`.
        suspended_at: Since when it has been suspended (SIGSTOP); None while it runs.
        role: `chief`, `worker` or `ps`; None in a job without roles.
        is_given_up: Whether it failed, and the job continues without it.
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
        """Whether it has ended with an error."""
        return self.has_ended and (self.exit_code != 0 or self.crash is not None)

    @property
    def has_ended_well(self) -> bool:
        return self.has_ended and not self.has_failed


@dataclass(frozen=True)
class GroupStatus:
    """The status of a job.

    Args:
        workers: Its processes in order.
        now: The current time, by `time.monotonic`.
        elapsed_s: The time since the start of the job, in seconds.
        timeout_s: The time limit of the job, in seconds; None for no limit.
        signals: The signals to end the job that the launcher received, in order.
        patience_s: How long a worker may stay suspended, in seconds; None where its peers detect it.
        restarts_left: The number of restarts left.
        restart_wait_s: The delay before a single worker is restarted, in seconds.
        is_elastic: Whether the number of workers may change, so that a loss may be answered without a restart.
        is_asked: Whether the workers were asked to make a backup and end.
        is_hung: Whether no process has made progress for the hang timeout.
    """

    workers: tuple[WorkerStatus, ...]
    now: float
    elapsed_s: float
    timeout_s: float | None = None
    signals: tuple[int, ...] = ()
    patience_s: float | None = None
    restarts_left: int = 0
    restart_wait_s: float = 0.0
    is_elastic: bool = False
    is_asked: bool = False
    is_hung: bool = False

    @property
    def coordinator(self) -> WorkerStatus | None:
        """The chief; None in a job without roles."""
        return next((worker for worker in self.workers if worker.role == "chief"), None)

    @property
    def is_out_of_time(self) -> bool:
        return self.timeout_s is not None and self.elapsed_s >= self.timeout_s

    @property
    def may_restart(self) -> bool:
        """Whether a failure may be answered by a restart: not after a signal or the timeout."""
        return (self.restarts_left > 0 or self.is_elastic) and not self.signals and not self.is_out_of_time

    @property
    def has_left_as_asked(self) -> bool:
        """Whether a worker has ended after the backup that it was asked for."""
        return self.is_asked and any(worker.exit_code == -signal.SIGUSR1 for worker in self.workers)

    def is_broken(self, worker: WorkerStatus) -> bool:
        """Returns whether a worker failed, or hangs in its shutdown after an exception."""
        hangs = worker.crashed_at is not None and self.now - worker.crashed_at > SHUTDOWN_S
        # A single worker has no waiting peers: it may take its time, as under plain Python.
        return worker.has_failed or (hangs and len(self.workers) > 1)

    def is_due(self, worker: WorkerStatus) -> bool:
        """Returns whether the restart delay of a broken worker has passed."""
        since = worker.ended_at if worker.ended_at is not None else worker.crashed_at
        return since is None or self.now - since >= self.restart_wait_s

    def is_suspended(self, worker: WorkerStatus, patience_s: float) -> bool:
        """Returns whether a worker has been suspended for longer than `patience_s`."""
        return worker.suspended_at is not None and self.now - worker.suspended_at > patience_s
