"""A coordinator, workers and servers started by hand, with nothing but TF_CONFIG, as any other launcher would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from patience import longer

from tfdistkit.cluster.ports import free_ports
from tfdistkit.launcher.local.watchdog import marked_processes

# Generous: the machine may be busy, and TensorFlow alone takes many seconds to load.
DEADLINE_S = 150.0

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "TF_NUM_INTRAOP_THREADS": "1",
}


class Role:
    """One process and what it prints."""

    def __init__(self, name: str, command: list[str], log: Path, variables: dict[str, str]):
        self.name, self._log = name, log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                cwd=log.parent,
                env={**os.environ, **_ENVIRONMENT, **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, times: int = 1) -> None:
        """Waits until it has printed something so often."""
        deadline = time.monotonic() + longer(DEADLINE_S)
        while self.printed.count(text) < times:
            assert self.process.poll() is None, f"{self.name} ended ({self.process.returncode}): {self.printed}"
            assert time.monotonic() < deadline, f"{self.name} did not print {text!r}: {self.printed}"
            time.sleep(0.02)

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Waits for the end and returns the exit code."""
        return self.process.wait(timeout=deadline_s)

    def kill(self) -> None:
        """Kills it, and waits until it is gone."""
        self.process.kill()
        self.process.wait(timeout=DEADLINE_S)

    def stop(self) -> None:
        """Stops it, as Ctrl-Z does."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets it go on."""
        self.process.send_signal(signal.SIGCONT)


class Roles:
    """The processes of a job, started and started again one by one.

    Args:
        folder: Where the script and what they print go.
        code: The script.
        workers: How many workers, beside one server and the coordinator.
        hosts: Host of a role's process, by its name such as `worker 1`, if not 127.0.0.1.
        within: What a process is started with, by its host.
    """

    def __init__(
        self,
        folder: Path,
        code: str,
        workers: int = 2,
        hosts: dict[str, str] | None = None,
        within: Callable[[str], list[str]] = lambda host: [],
    ):
        self._folder, self._within, self._hosts = folder, within, hosts or {}
        self._script = folder / "script.py"
        self._script.write_text(textwrap.dedent(code), encoding="utf-8")
        names = ["chief 0", *(f"worker {i}" for i in range(workers)), "ps 0"]
        self.addresses = {name: f"{self._host(name)}:{port}" for name, port in zip(names, free_ports(len(names)))}
        self._mark = f"TEST_MARK={uuid.uuid4().hex}"
        self.running: dict[str, Role] = {}
        self._started: list[Role] = []

    def _host(self, name: str) -> str:
        return self._hosts.get(name, "127.0.0.1")

    def start(self, name: str, *words: str) -> Role:
        """Starts a process, or starts it again."""
        role, index = name.split()
        cluster: dict[str, list[str]] = {}
        for other, address in self.addresses.items():
            cluster.setdefault(other.split()[0], []).append(address)
        variable, _, value = self._mark.partition("=")
        config = json.dumps({"cluster": cluster, "task": {"type": role, "index": int(index)}})
        command = [*self._within(self._host(name)), sys.executable, str(self._script), *words]
        log = self._folder / f"{role}{index}.{len(self._started)}.log"
        self.running[name] = Role(name, command, log, {"TF_CONFIG": config, variable: value})
        self._started.append(self.running[name])
        return self.running[name]

    def start_all(self, *words: str) -> Role:
        """Starts all, and returns the coordinator."""
        for name in sorted(self.addresses, reverse=True):
            self.start(name, *words)
        return self.running["chief 0"]

    def left(self) -> list[int]:
        """Returns which processes of the job are alive."""
        return marked_processes(self._mark)

    def sweep(self) -> None:
        """Kills what is left, so that a failing test leaves nothing either."""
        for role in self._started:
            role.kill()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def roles(folder: Path, code: str, **options: object) -> Iterator[Roles]:
    """A job of which nothing is left at the end."""
    job = Roles(folder, code, **options)  # type: ignore[arg-type]
    try:
        yield job
    finally:
        job.sweep()
