"""The connection to the agent of one actor, through the Ray driver of the job."""

from __future__ import annotations

import os
from typing import IO

from tfdistkit.launcher.ssh.connection import Connection


class Pipes:
    """Three pipes to the driver, which carries their bytes to and from one agent (see `ssh.connection.Carrier`)."""

    pid = 0

    def __init__(self) -> None:
        (stdin, self._stdin), (self._stdout, stdout), (self._stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        # The driver's ends, in the order of its task.
        self.driver_ends = (stdin, stdout, stderr)
        self.stdin: IO[bytes] | None = os.fdopen(self._stdin, "wb", buffering=0)
        self.stdout: IO[bytes] | None = os.fdopen(self._stdout, "rb", buffering=0)
        self.stderr: IO[bytes] | None = os.fdopen(self._stderr, "rb", buffering=0)

    def close_driver_ends(self) -> None:
        """Closes the driver's ends in this process, once the driver has them."""
        for descriptor in self.driver_ends:
            os.close(descriptor)

    def poll(self) -> int | None:
        return 0  # no process of its own: the end of the pipes is all there is to wait for

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def send_signal(self, sig: int) -> None:
        pass


class ActorConnection(Connection):
    """The connection to the agent of one actor.

    Args:
        host: The name of the actor's node.
        pipes: The pipes to the driver.
        first_line: The source of the agent.
    """

    lost_with = "its Ray actor on"

    def __init__(self, host: str, pipes: Pipes, first_line: bytes):
        super().__init__(host, pipes, first_line)

    def _end_reason(self) -> str:
        said = [line.strip() for line in (self.said + self._greeting).decode(errors="replace").splitlines()]
        reason = "; ".join(line for line in said[-5:] if line)
        return reason or "The Ray driver of the job died, and with it its actors: Ray ends it when its own node dies."
