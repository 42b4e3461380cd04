"""An agent's workers on its host, their streams, and the watchdog that kills them if the agent dies.

Runs on the host without site-packages: imports only the standard library and sent modules.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

from tfdistkit.launcher.local import watchdog
from tfdistkit.launcher.ssh.agent.progress import Progress
from tfdistkit.launcher.ssh.agent.protocol import encode


class Worker:
    """A worker on this host, and the part of its status that was sent to the launcher.

    Args:
        number: The launcher's number for it.
        child: Its process.
        record: The path of its crash record.
    """

    def __init__(self, number: int, child: subprocess.Popen[bytes], record: str):
        self.number, self.pid, self.record = number, child.pid, record
        self.child = child
        self.progress = Progress(number, os.path.dirname(record))
        self.exit_code: int | None = None
        self.is_gone = self.is_suspended = self.is_recorded = False

    def poll(self) -> Iterator[bytes]:
        """Yields messages about changes since the last call."""
        if self.is_gone:
            return
        before = self.exit_code
        if before is None:
            self.exit_code = self._exit_code()
        # In this order: a worker writes its crash record before it ends.
        if not self.is_recorded and (record := _contents(self.record)):
            self.is_recorded = True
            yield encode({"is": "crash", "worker": self.number}, record)
        # The file name of `report.alone`, which cannot be imported here.
        if before is None and self.exit_code == 0 and os.path.exists(f"{os.path.dirname(self.record)}/alone"):
            yield encode({"is": "alone", "worker": self.number})
        if before is None and self.exit_code is not None:
            yield encode({"is": "ended", "worker": self.number, "code": self.exit_code})
        if self.exit_code is not None:
            if not watchdog.group_members(self.pid):
                self.is_gone = True
                yield encode({"is": "gone", "worker": self.number})
            return
        yield from self.progress.poll()
        is_suspended = watchdog.process_state(self.pid) in ("T", "t")
        if is_suspended != self.is_suspended:
            self.is_suspended = is_suspended
            yield encode({"is": "suspended", "worker": self.number, "suspended": is_suspended})

    def _exit_code(self) -> int | None:
        # WNOWAIT keeps the zombie: its process id cannot be reused, so a signal reaches only its own group.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send_signal(self, number: int) -> None:
        """Sends a signal to its group; does nothing when the group is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Stream:
    """One output stream of a worker, read while the launcher grants credit.

    Args:
        worker: The worker's number.
        channel: `stdout` or `stderr`.
        descriptor: The file descriptor of the pipe.
    """

    def __init__(self, worker: int, channel: str, descriptor: int):
        os.set_blocking(descriptor, False)
        self.worker, self.channel, self.descriptor = worker, channel, descriptor
        self.in_flight_bytes = 0


def start_watchdog(mark: str, folder: str) -> tuple[int, int]:
    """Forks a watchdog of this process.

    Args:
        mark: `NAME=value`, which is set in the environment of all processes of the job on this host.
        folder: The folder of their files; it is removed at the end.

    Returns:
        The pipe that the watchdog reads (see `watchdog`), and its process id.
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
        # The watchdog must not hold the connection open.
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
