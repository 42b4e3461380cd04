"""Random kills, stops and changes of a training whose number of workers may change: it always comes to its end.

Each seed is a job with three faults at random moments, also while the workers start. `-m thorough` runs 33 more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from job_process import Job, wait_until, write_script
from random_faults import DEADLINE_S, FAULTS, TRAIN, VARIABLES, Chaos, result

from tfdistkit.launcher.local.watchdog import marked_processes

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]


class ChaosHere(Chaos):
    """What happens to a job on this machine."""

    def __init__(self, folder: Path, seed: int):
        super().__init__(folder, seed)
        self.script = write_script(folder, TRAIN)
        self.discovery = folder / "hosts.sh"
        self.discovery.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        self.discovery.chmod(0o755)
        self._say(2)
        self.start()

    @property
    def faults(self) -> list[Callable[[], None]]:
        return [self.kill, self.kill, self.suspend, self.resize, self.stop_and_start]

    def start(self) -> None:
        words = ("-np", "1:3", "--host-discovery-script", str(self.discovery), "--cool-down", "0.5")
        words += ("--threads-per-worker", "1", "--max-restarts", "20", "--log-dir", f"logs.{self.run}")
        self.job = Job(*words, self.script, "multiworker", str(self.run), cwd=self.folder, **VARIABLES)

    def _say(self, slots: int) -> None:
        self.slots = slots
        (self.folder / "hosts.new").write_text(f"localhost:{slots}")
        (self.folder / "hosts.new").rename(self.folder / "hosts")

    def workers(self) -> list[int]:
        found: list[int] = []

        def are_there() -> bool:
            for pid in marked_processes(self.job.mark):
                with contextlib.suppress(OSError):
                    if b"tfdistkit.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(pid)
            return bool(found) or self.job.process.poll() is not None

        wait_until(are_there, "a worker", DEADLINE_S)
        return sorted(found)

    def resize(self) -> None:
        """Lets a host come or go."""
        self._say(self.random.choice([slots for slots in (1, 2, 3) if slots != self.slots]))

    def require_nothing_left(self) -> None:
        wait_until(lambda: self.job.left() == [], f"the end of all processes, after {self.done}", 15)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Returns what one worker comes to, that nothing happens to."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "calm").touch()
    running = Job("-np", "1", write_script(folder, TRAIN), "multiworker", "0", cwd=folder, **VARIABLES)
    try:
        assert running.end(DEADLINE_S).code == 0, running.stderr_path.read_text()
    finally:
        running.sweep()
    return result(folder)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 34))])
def test_it_comes_to_the_end_that_it_has_without_faults(alone: list[Any], tmp_path: Path, seed: int) -> None:
    chaos = ChaosHere(tmp_path, seed)
    try:
        for _ in range(FAULTS):
            chaos.happen()
        (tmp_path / "calm").touch()
        chaos.finish((0,))
    finally:
        chaos.job.sweep()
    chaos.require_the_end_of(alone)
