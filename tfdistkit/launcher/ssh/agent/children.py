"""An agent's workers on its host, their streams, and the watchdog that ends them when the agent cannot.

Runs on the host, in an agent without site-packages: the standard library only, and modules that are sent with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

from tfdistkit.launcher.local import watchdog
from tfdistkit.launcher.ssh.agent.protocol import encode


class Worker:
    """A worker on this host, and what the launcher was told of it.

    Args:
        number: What the launcher knows it by.
        child: Its process.
        record: The file that it leaves when it crashes.
    """

    def __init__(self, number: int, child: subprocess.Popen[bytes], record: str):
        self.number, self.pid, self.record = number, child.pid, record
        self.child = child
        self.exit_code: int | None = None
        self.is_gone = self.is_suspended = self.is_recorded = False

    def look(self) -> Iterator[bytes]:
        """Yields what the launcher does not know yet."""
        if self.is_gone:
            return
        before = self.exit_code
        if before is None:
            self.exit_code = self._exit_code()
        # In this order: a worker writes its record before it ends.
        if not self.is_recorded and (record := _contents(self.record)):
            self.is_recorded = True
            yield encode({"is": "crash", "worker": self.number}, record)
        # The mark of `report.alone`, which cannot be imported here.
        if before is None and self.exit_code == 0 and os.path.exists(f"{os.path.dirname(self.record)}/alone"):
            yield encode({"is": "alone", "worker": self.number})
        if before is None and self.exit_code is not None:
            yield encode({"is": "ended", "worker": self.number, "code": self.exit_code})
        if self.exit_code is not None:
            if not watchdog.group_members(self.pid):
                self.is_gone = True
                yield encode({"is": "gone", "worker": self.number})
            return
        is_suspended = watchdog.process_state(self.pid) in ("T", "t")
        if is_suspended != self.is_suspended:
            self.is_suspended = is_suspended
            yield encode({"is": "suspended", "worker": self.number, "suspended": is_suspended})

    def _exit_code(self) -> int | None:
        # Not collected: as long as the zombie is there, a signal to its group reaches nobody else.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send_signal(self, number: int) -> None:
        """Sends a signal to its group; does nothing when the group is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Stream:
    """One stream of a worker: read as long as the launcher takes what is read.

    Args:
        worker: Whose it is.
        channel: `stdout` or `stderr`.
        descriptor: Where it is read.
    """

    def __init__(self, worker: int, channel: str, descriptor: int):
        os.set_blocking(descriptor, False)
        self.worker, self.channel, self.descriptor = worker, channel, descriptor
        self.in_flight_bytes = 0


def start_watchdog(mark: str, folder: str) -> tuple[int, int]:
    """Forks a watchdog of this process.

    Args:
        mark: `NAME=value`, which all processes of the job on this host have among their variables.
        folder: Where they have their files; it is removed in the end.

    Returns:
        The pipe that the watchdog listens to (see `watchdog`), and its process.
    """
    agent = os.getpid()
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(reading)
        return writing, child
    try:
        os.setsid()
        os.close(writing)
        os.dup2(reading, 0)
        # Nobody must take the connection for open because the watchdog has it.
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        watchdog.guard(agent, mark)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _contents(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
