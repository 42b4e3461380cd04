"""What a place to start processes must offer. A new one is one file and one row here."""

from __future__ import annotations

import importlib
from typing import IO, Protocol

from tfdistkit.launcher.spec import ProcessSpec

# Name -> module; each has a class `Launcher`.
BACKENDS = {
    "local": "tfdistkit.launcher.local",
}


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

    def start(self, spec: ProcessSpec) -> WorkerHandle:
        """Starts one worker."""

    def wait(self, timeout_s: float) -> None:
        """Returns when a worker ends, or after `timeout_s`."""

    def close(self) -> None:
        """Ends every process of the job that is still there, kindly or not, and gives everything back."""


def load_backend(name: str, job_id: str) -> Backend:
    """Returns a place to start a job's processes.

    Args:
        name: One of `BACKENDS`.
        job_id: The job's mark.
    """
    backend: Backend = importlib.import_module(BACKENDS[name]).Launcher(job_id)
    return backend
