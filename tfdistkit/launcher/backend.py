"""What a backend must offer: something that starts processes. A new one is one file, and one row of `registry`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, Protocol

from tfdistkit.launcher.process_spec import ProcessSpec


@dataclass(frozen=True)
class Loss:
    """How a worker was lost together with the way to its host.

    Args:
        text: What is known of it, in a sentence.
        time: When the host was heard of last, in seconds since the epoch.
        lost_with: What it was lost with, before the name of the host: `its host`.
    """

    text: str
    time: float
    lost_with: str = "its host"


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
        """Whether it is suspended (SIGSTOP), so that it neither works nor ends."""


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
