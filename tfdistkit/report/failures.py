"""Which worker failed first: one job that breaks usually breaks everywhere, and only one report is the cause."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.report.names import ProcessName

# What a worker raises when another one is gone: such a failure is a consequence of the peer's. A program's own errors
# can read just the same (the connection to a database), so their types decide, and texts only among TensorFlow's own:
# those of its collectives and its coordination service, gRPC, Gloo and NCCL.
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
    # Ours: see strategies.
    "no longer takes part",
    "has shown no sign of life",
    "is gone, and the variables on it with it",
)


@dataclass(frozen=True)
class Failure:
    """How one worker failed.

    Args:
        rank: The worker's number in the job; where processes have roles, among those of its role.
        host: The machine it ran on.
        pid: Its process there.
        exit_code: What the shell would say: 1 to 255, 128 + the signal's number when it was killed.
        time: Seconds since the epoch: of the exception, or of the end as the launcher saw it.
        signal: The name of the signal that ended it, such as `SIGKILL`; None when it ended by itself.
        error_type: The class of the unhandled exception, None when none was recorded.
        message: The exception's text, or an empty string.
        traceback: As Python prints it; an empty string when no exception was recorded.
        log_path: What the worker wrote to stderr, whole.
        role: `chief`, `worker` or `ps`; None in a job whose processes are all alike.
        remark: What the launcher knows besides, in a sentence; or an empty string.
        loss: How it was lost together with the way to its host, in a sentence; or an empty string.
        kinds: The classes of the exception and of those it was raised from, see `CrashRecord`.
        steps: How many steps its optimizer had taken; None if nobody knows.
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
    kinds: tuple[str, ...] = ()
    steps: int | None = None

    @property
    def name(self) -> ProcessName:
        """What the worker is called: `rank 1`, `ps 0`."""
        return ProcessName(self.rank, self.role)

    @property
    def is_consequence(self) -> bool:
        """Whether the worker only reports that another one is gone."""
        if any(kind in self.kinds for kind in _OF_LOST_PEERS):
            return True
        return _OF_TENSORFLOW in self.kinds and any(words in self.message for words in _PEER_IS_GONE)

    @property
    def headline(self) -> str:
        """What happened in a few words: `was killed by SIGKILL`, `raised ValueError`, `ended with exit code 3`."""
        if self.loss:
            return f"was lost with its host {self.host}"
        if self.signal is not None:
            return f"was killed by {self.signal}"
        if self.error_type is not None and self.error_type != "SystemExit":
            return f"raised {self.error_type}"
        return f"ended with exit code {self.exit_code}"


def first_cause_first(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Sorts failures: those with a cause of their own before mere consequences, and then by time."""
    return tuple(sorted(failures, key=lambda one: (one.is_consequence, one.time, one.role or "", one.rank)))


def signal_name(number: int) -> str:
    """Returns `SIGKILL` for 9, and `signal 77` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
