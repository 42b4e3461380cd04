"""`tfdistkit run -H` as a user starts it on the login host: a deadline, and a look at what it leaves on any host."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from net_hosts import LOGIN, NetHosts

# Generous: the machine may be busy. Every job ends long before.
DEADLINE_S = 90.0
# Where this Python's tfdistkit is, if it is not installed.
PATHS = os.environ.get("PYTHONPATH", "")

_numbers = itertools.count()


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class SshJob:
    """A running `tfdistkit run` on the login host.

    Args:
        hosts: The hosts.
        words: What follows `tfdistkit run`.
        stdout: Where its output goes; None for a file.
        **variables: Over those of this process, on the login host only.
    """

    def __init__(self, hosts: NetHosts, *words: str, stdout: int | None = None, **variables: str):
        self.hosts, self.words = hosts, words
        number, folder = next(_numbers), hosts.disk(LOGIN)
        self.stdout_path, self.stderr_path = folder / f"job.{number}.stdout", folder / f"job.{number}.stderr"
        self.started = time.monotonic()
        with self.stdout_path.open("wb") as file, self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                hosts.command(LOGIN, sys.executable, "-m", "tfdistkit", "run", *words),
                env={**os.environ, "TMPDIR": str(hosts.temporary(LOGIN)), **variables},
                stdin=subprocess.DEVNULL,
                stdout=file if stdout is None else stdout,
                stderr=stderr,
                preexec_fn=_heed_signals,  # noqa: PLW1509
            )

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        return self.stderr_path.read_text(encoding="utf-8", errors="replace")

    def end(self, deadline_s: float = DEADLINE_S) -> Ended:
        """Waits for the end of the job."""
        code = self.process.wait(timeout=deadline_s)
        return Ended(code, self.stdout, self.stderr, time.monotonic() - self.started)

    def wait_for(self, *texts: str, deadline_s: float = DEADLINE_S) -> None:
        """Waits until the job has shown texts, each of them."""

        def has_come() -> bool:
            return all(text in self.stdout for text in texts) or self.process.poll() is not None

        wait_until(has_come, f"{texts}", deadline_s, told=lambda: f"{self.stdout}\n{self.stderr}")
        assert self.process.poll() is None, f"{self.stdout}\n{self.stderr}"

    def nothing_is_left(self, deadline_s: float = 10.0, numbers: tuple[int, ...] = ()) -> None:
        """Waits until there is nothing of the job on any host (or on some), neither a process nor a file."""
        for number in numbers or (LOGIN, *self.hosts.numbers):
            wait_until(
                lambda number=number: self.hosts.pids(number) == [],
                f"the end of all processes on {self.hosts.name(number)}",
                deadline_s,
                told=lambda number=number: str([command_line(pid) for pid in self.hosts.pids(number)]),
            )
            if number != LOGIN:
                left = list(self.hosts.temporary(number).iterdir())
                assert left == [], left

    def pid_of(self, rank: int) -> int:
        """Returns the process of a rank that printed `up at <pid of its host>`, by this machine's number."""
        (line,) = (line for line in self.stdout.splitlines() if line.startswith(f"[{rank}] up at "))
        host, number = line.split()[3:5]
        for pid in self.hosts.pids(int(host[1:])):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
                if numbers[-1] == number:
                    return pid
        raise AssertionError(f"rank {rank} is not there: {line}")

    def sweep(self) -> None:
        """Kills what is left, so that a failing test leaves nothing either."""
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)
        for number in (LOGIN, *self.hosts.numbers):
            for pid in self.hosts.pids(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def ssh_job(hosts: NetHosts, *words: str, stdout: int | None = None, **variables: str) -> Iterator[SshJob]:
    """Starts `tfdistkit run` on the login host; at the end nothing of it is left."""
    running = SshJob(hosts, "-x", f"PYTHONPATH={PATHS}", *words, stdout=stdout, **variables)
    try:
        yield running
    finally:
        running.sweep()


def run_on_hosts(hosts: NetHosts, *words: str, deadline_s: float = DEADLINE_S, **variables: str) -> Ended:
    """Runs `tfdistkit run` to its end, and checks that nothing of it is left."""
    with ssh_job(hosts, *words, **variables) as running:
        ended = running.end(deadline_s)
        running.nothing_is_left()
        return ended


def command_line(pid: int) -> str:
    """Returns the command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def wait_until(
    condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S, told: Callable[[], str] = lambda: ""
) -> None:
    """Waits until something is true."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}\n{told()}"
        time.sleep(0.05)


def _heed_signals() -> None:
    """A shell that runs the tests in the background ignores SIGINT, nohup SIGHUP, and children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
