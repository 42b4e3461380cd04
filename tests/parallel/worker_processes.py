"""Worker processes started by hand, with nothing but TF_CONFIG, as any other launcher would start them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

from tfdistkit.cluster.ports import free_ports

# Generous: the machine may be busy, and TensorFlow alone takes many seconds to load.
DEADLINE_S = 120.0

_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
}


class Worker:
    """One running rank and what it prints."""

    def __init__(self, rank: int, addresses: list[str], script: Path, folder: Path):
        self.rank, self.address = rank, addresses[rank]
        self.log = folder / f"rank{rank}.log"
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script)],
                env={**os.environ, **_ENVIRONMENT, "TF_CONFIG": json.dumps(task)},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    @property
    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str) -> None:
        """Waits until the worker has printed something."""
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.printed:
            assert self.process.poll() is None, f"rank {self.rank} ended: {self.printed}"
            assert time.monotonic() < deadline, f"rank {self.rank} did not print {text!r}: {self.printed}"
            time.sleep(0.05)

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Waits for the end and returns the exit code."""
        return self.process.wait(timeout=deadline_s)


@contextlib.contextmanager
def workers(
    code: str, folder: Path, world_size: int = 2, start: tuple[int, ...] | None = None
) -> Iterator[list[Worker]]:
    """Starts the ranks `start` (all, if left out) of a job that runs `code`; kills what is left at the end."""
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(code), encoding="utf-8")
    addresses = [f"127.0.0.1:{port}" for port in free_ports(world_size)]
    running = [Worker(rank, addresses, script, folder) for rank in (start or range(world_size))]
    try:
        yield running
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.wait(timeout=DEADLINE_S)


def run_workers(code: str, folder: Path, world_size: int = 2) -> list[str]:
    """Runs a job to its end and returns what each rank printed; all have to succeed."""
    with workers(code, folder, world_size) as running:
        for worker in running:
            assert worker.end() == 0, worker.printed
        return [worker.printed for worker in running]
