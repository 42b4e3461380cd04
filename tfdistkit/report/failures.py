"""Finds the first failure of a job: one failure usually makes the other workers fail, too."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.report.names import ProcessName

# Errors of a worker that lost a peer: consequences, not causes. A program's own errors can have the same text (the
# connection to a database), so the type decides, and texts only for TensorFlow's own errors: those of its collectives,
# its coordination service, gRPC, Gloo and NCCL.
_OF_LOST_PEERS = ("horovod.common.exceptions.HorovodInternalError", "tfdistkit.errors.RendezvousError")
_OF_TENSORFLOW = "tensorflow.python.framework.errors_impl.OpError"
_PEER_IS_GONE = (
    "Collective ops is aborted",
    "Collective ops aborted",
    "Error reported from /job:",
    "CoordinationService",
    "coordination service",
    "failed to connect to all addresses",
    "Connection reset by peer",
    "Connection refused",
    "Socket closed",
    "Broken pipe",
    "Horovod has been shut down",
    "NCCL remote error",
    # Errors of tfdistkit: see `strategies`.
    "no longer takes part",
    "has shown no sign of life",
    "is gone, and the variables on it with it",
)


# Errors of a worker that waited too long for its peers: they are alive, but not in the same collective.
_WAITED_TOO_LONG = ("did not join a collective operation", "Collective has timed out")


@dataclass(frozen=True)
class Failure:
    """Describes the failure of one worker.

    Args:
        rank: The rank of the worker; in a job with roles, its index within its role.
        host: The machine of the worker.
        pid: Its process id.
        exit_code: The exit code as in a shell: 1 to 255, 128 + the signal's number if it was killed.
        time: Seconds since the epoch: of the exception, or of the exit as the launcher observed it.
        signal: The name of the signal that killed it, such as `SIGKILL`; None otherwise.
        error_type: The class of the unhandled exception; None without a crash record.
        message: The exception's text, or an empty string.
        traceback: The traceback as Python prints it, or an empty string.
        log_path: The complete stderr of the worker.
        role: `chief`, `worker` or `ps`; None in a job without roles.
        remark: More information of the launcher as a sentence, or an empty string.
        loss: How the connection to its host was lost, as a sentence, or an empty string.
        lost_with: The words between `was lost with` and the name of its host, such as `its host`.
        kinds: The classes of the exception and of those it was raised from, see `CrashRecord`.
        steps: The steps of its optimizer; None if unknown.
    """

    rank: int
    host: str
    pid: int
    exit_code: int
    time: float
    signal: str | None = None
    error_type: str | None = None
    message: str = ""
    traceback: str = ""
    log_path: Path | None = None
    role: str | None = None
    remark: str = ""
    loss: str = ""
    lost_with: str = "its host"
    kinds: tuple[str, ...] = ()
    steps: int | None = None

    @property
    def name(self) -> ProcessName:
        """Returns the name of the worker: `rank 1`, `ps 0`."""
        return ProcessName(self.rank, self.role)

    @property
    def is_consequence(self) -> bool:
        """Returns whether the failure is only the consequence of a lost peer."""
        if any(kind in self.kinds for kind in _OF_LOST_PEERS):
            return True
        return _OF_TENSORFLOW in self.kinds and any(words in self.message for words in _PEER_IS_GONE)

    @property
    def is_collective_timeout(self) -> bool:
        """Returns whether the worker exceeded the timeout of a collective, waiting for peers."""
        return _OF_TENSORFLOW in self.kinds and any(words in self.message for words in _WAITED_TOO_LONG)

    @property
    def headline(self) -> str:
        """Returns a short description: `was killed by SIGKILL`, `raised ValueError`, `ended with exit code 3`."""
        if self.loss:
            return f"was lost with {self.lost_with} {self.host}"
        if self.signal is not None:
            return f"was killed by {self.signal}"
        if self.error_type is not None and self.error_type != "SystemExit":
            return f"raised {self.error_type}"
        return f"ended with exit code {self.exit_code}"


def first_cause_first(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Sorts failures: causes before consequences of lost peers, then by time."""
    return tuple(sorted(failures, key=lambda one: (one.is_consequence, one.time, one.role or "", one.rank)))


def signal_name(number: int) -> str:
    """Returns the name of a signal: `SIGKILL` for 9, `signal 77` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
