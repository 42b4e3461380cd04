"""The contract of a launcher backend, which starts workers. A new backend is one file, and one row of `registry`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Protocol

from tfdistkit.errors import UnsupportedError
from tfdistkit.launcher.process_spec import ProcessSpec


class NoRoomError(UnsupportedError):
    """A cluster had no room for the workers after all: an elastic job tries again with the room of then."""


@dataclass(frozen=True)
class Loss:
    """Describes how a worker was lost because the connection to its host failed.

    Args:
        text: The reason, as a sentence.
        time: The time of the last message from the host, in seconds since the epoch.
        lost_with: The words between `was lost with` and the name of the host in a report, such as `its host`.
    """

    text: str
    time: float
    lost_with: str = "its host"


class WorkerHandle(Protocol):
    """A running or ended worker, together with the processes that it started (its process group)."""

    @property
    def spec(self) -> ProcessSpec:
        """The plan that the worker was started from."""

    @property
    def host(self) -> str:
        """The name of the machine that the worker runs on."""

    @property
    def pid(self) -> int:
        """The process id of the worker on that machine."""

    @property
    def loss(self) -> Loss | None:
        """How the worker was lost with its host; None while it runs, and if its end was observed."""

    @property
    def stdout(self) -> IO[bytes]:
        """The read end of the standard output of the worker."""

    @property
    def stderr(self) -> IO[bytes]:
        """The read end of the standard error of the worker."""

    def exit_code(self) -> int | None:
        """Returns the exit code of the worker: None while it runs, -N if signal N killed it. Never waits."""

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process group of the worker; does nothing if the group has ended."""

    def is_gone(self) -> bool:
        """Returns whether the worker and its whole process group have ended."""

    def is_suspended(self) -> bool:
        """Returns whether the worker is suspended (SIGSTOP), so that it neither makes progress nor exits."""


class Backend(Protocol):
    """Starts the workers of one job, waits for them, and ends them."""

    @property
    def patience_s(self) -> float | None:
        """Seconds that a worker may stay suspended; None if its peers detect that, and end with an error."""

    @property
    def blindness_s(self) -> float:
        """Seconds that a lost worker can stay undetected here, after its peers have already failed because of it."""

    def start(self, spec: ProcessSpec) -> WorkerHandle:
        """Starts one worker, and returns its handle.

        Args:
            spec: The plan of the worker.
        """

    def wait(self, timeout_s: float) -> None:
        """Waits until a worker ends, for `timeout_s` seconds at most."""

    def close(self) -> None:
        """Ends all remaining processes of the job, by SIGKILL if needed, and releases all resources."""
