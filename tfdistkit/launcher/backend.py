"""What a place to start processes must offer. A new one is one file and one row here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tfdistkit.launcher.spec import ProcessSpec

# Name -> module; each has a class `Launcher`. What its workers are told of the cluster is in `rank_variables`.
BACKENDS = {
    "local": "tfdistkit.launcher.local.backend",
    "horovod": "tfdistkit.launcher.local.horovod",
    "mpi": "tfdistkit.launcher.mpi.backend",
}

# The same on several hosts, where a job names them.
ON_HOSTS = {
    "local": "tfdistkit.launcher.ssh.backend",
    "horovod": "tfdistkit.launcher.ssh.backend",
    "mpi": "tfdistkit.launcher.mpi.hosts",
}

# Those whose processes can have roles (chief, worker, ps): they are told of each other by TF_CONFIG.
WITH_ROLES = ("local", "mpi")


@dataclass(frozen=True)
class Loss:
    """How a worker was lost together with the way to its host.

    Args:
        text: What is known of it, in a sentence.
        time: When the host was heard of last, in seconds since the epoch.
    """

    text: str
    time: float


class WorkerHandle(Protocol):
    """One worker that was started, with all processes that it starts itself (its group)."""

    @property
    def spec(self) -> ProcessSpec:
        """What was asked for."""

    @property
    def host(self) -> str:
        """The name of its machine."""

    @property
    def pid(self) -> int:
        """Its process there."""

    @property
    def loss(self) -> Loss | None:
        """How it was lost with its host; None for one that is there, or that ended in sight."""

    @property
    def stdout(self) -> IO[bytes]:
        """What it prints, to be read."""

    @property
    def stderr(self) -> IO[bytes]:
        """What it complains, to be read."""

    def exit_code(self) -> int | None:
        """None while it runs; -N when it was killed by signal N."""

    def send_signal(self, number: int) -> None:
        """Sends a signal to its group; does nothing when the group is gone."""

    def is_gone(self) -> bool:
        """Whether it has ended, and all of its group too."""

    def is_suspended(self) -> bool:
        """Whether somebody stopped it (SIGSTOP), so that it neither works nor ends."""


class Backend(Protocol):
    """A place where workers run."""

    @property
    def patience_s(self) -> float | None:
        """How long a suspended worker is waited for; None where the other workers notice it, and end by themselves."""

    @property
    def blindness_s(self) -> float:
        """How long it can take to see that a worker is gone: others may complain of it before."""

    def start(self, spec: ProcessSpec) -> WorkerHandle:
        """Starts one worker."""

    def wait(self, timeout_s: float) -> None:
        """Returns when a worker ends, or after `timeout_s`."""

    def close(self) -> None:
        """Ends every process of the job that is still there, kindly or not, and gives everything back."""


def load_backend(name: str, job_id: str, size: int, mpi_args: Sequence[str] = ()) -> Backend:
    """Returns a place to start a job's processes.

    Args:
        name: One of `BACKENDS`.
        job_id: The job's mark.
        size: How many processes the job has.
        mpi_args: More options for mpirun, for the one that calls it.

    Raises:
        TfdistkitError: if this machine lacks what the backend needs.
    """
    more = (mpi_args,) if mpi_args else ()
    backend: Backend = importlib.import_module(BACKENDS[name]).Launcher(job_id, size, *more)
    return backend
