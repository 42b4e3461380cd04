"""`tfdistkit run` as a user starts it: a process of its own, with a deadline, and a look at what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from patience import longer

from tfdistkit.launcher.local.watchdog import marked_processes

# Generous: the machine may be busy. Every test ends long before.
DEADLINE_S = 60.0

needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None and os.environ.get("TFDISTKIT_REQUIRE_HOROVOD") != "1",
    reason="Open MPI is not tested: there is no mpirun (apt-get install openmpi-bin)",
)


def heed_signals() -> None:
    """A shell that runs the tests in the background ignores SIGINT, nohup SIGHUP, and children inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Ended:
    """A job that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Job:
    """A running `tfdistkit run`; all of its processes carry a mark of this test."""

    def __init__(self, *words: str, cwd: Path, **variables: str):
        self.mark = f"TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.started = time.monotonic()
        self.stdout_path, self.stderr_path = cwd / "job.stdout", cwd / "job.stderr"
        with self.stdout_path.open("wb") as stdout, self.stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tfdistkit", "run", *words],
                cwd=cwd,
                env={**os.environ, "TMPDIR": str(cwd), **variables, name: value},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                preexec_fn=heed_signals,  # noqa: PLW1509
            )

    @property
    def stdout(self) -> str:
        return self.stdout_path.read_text(encoding="utf-8")

    def end(self, deadline_s: float = DEADLINE_S) -> Ended:
        """Waits for the end of the job."""
        code = self.process.wait(timeout=deadline_s)
        seconds = time.monotonic() - self.started
        return Ended(code, self.stdout, self.stderr_path.read_text(encoding="utf-8"), seconds)

    def wait_for_files(self, *paths: Path) -> None:
        """Waits until the workers have made files."""
        wait_until(lambda: all(path.exists() for path in paths), f"{paths} in {self.stdout_path}")

    def left(self) -> list[int]:
        """Returns which processes of the job are alive."""
        return marked_processes(self.mark)

    def sweep(self) -> None:
        """Kills what is left, so that a failing test leaves nothing either."""
        for pid in {self.process.pid, *self.left()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=DEADLINE_S)


@contextlib.contextmanager
def job(*words: str, cwd: Path, **variables: str) -> Iterator[Job]:
    """Starts `tfdistkit run` in a folder, with variables over those of this process."""
    running = Job(*words, cwd=cwd, **variables)
    try:
        yield running
    finally:
        running.sweep()


def run_job(*words: str, cwd: Path, **variables: str) -> Ended:
    """Runs `tfdistkit run` to its end, and checks that nothing of it is left."""
    with job(*words, cwd=cwd, **variables) as running:
        ended = running.end()
        assert running.left() == []
        return ended


def write_script(folder: Path, text: str, name: str = "script.py") -> str:
    """Writes a script and returns its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits until something is true."""
    deadline = time.monotonic() + longer(deadline_s)
    while not condition():
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)
