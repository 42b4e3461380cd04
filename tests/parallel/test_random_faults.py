"""Random kills, stops and changes of a training whose number of workers may change: it always comes to its end.

Each seed is a job with three faults at random moments, also while the workers start. `-m thorough` runs 33 more.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted_rows import RESULT, SETUP, require_each_row_once, rows_by_step
from job_process import Job, wait_until, write_script
from patience import longer

from tfdistkit.launcher.local.watchdog import marked_processes

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]

DEADLINE_S = 300.0
FAULTS = 3
VARIABLES = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}

TRAIN = f"""
{SETUP}
run = int(sys.argv[2])
steps = (here / f"steps.{{run:02}}.{{attempt:02}}.{{rank}}").open("w", buffering=1)


class Slow(keras.callbacks.Callback):
    "Prints and writes each step, and is slow until no more faults come."
    epoch = count = 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        print("line", run, attempt, rank, Slow.count, flush=True)
        Slow.count += 1
        write_step(steps, self.epoch * 12 + batch, self.model)
        time.sleep(0 if (here / "calm").exists() else 0.6)


# The steps are written before the backup that has them.
history = model.fit(data, epochs=3, verbose=0, callbacks=[Slow(), BackupAndResume(here / "backup", save_freq=2)])
{RESULT}
"""


class Chaos:
    """An elastic job in a folder, and what happens to it."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.run, self.done = 0, []
        self.told: dict[int, str] = {}
        self.script = write_script(folder, TRAIN)
        self.discovery = folder / "hosts.sh"
        self.discovery.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
        self.discovery.chmod(0o755)
        self._say(2)
        self.job = self._start()

    def _start(self) -> Job:
        words = (
            "-np",
            "1:3",
            "--host-discovery-script",
            str(self.discovery),
            "--cool-down",
            "0.5",
            "--threads-per-worker",
            "1",
        )
        words += ("--max-restarts", "20", "--log-dir", f"logs.{self.run}")
        return Job(*words, self.script, "multiworker", str(self.run), cwd=self.folder, **VARIABLES)

    def _say(self, slots: int) -> None:
        self.slots = slots
        (self.folder / "hosts.new").write_text(f"localhost:{slots}")
        (self.folder / "hosts.new").rename(self.folder / "hosts")

    def workers(self) -> list[int]:
        """Returns the processes of the ranks that are alive."""
        found = []
        for pid in marked_processes(self.job.mark):
            with contextlib.suppress(OSError):
                if b"tfdistkit.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return sorted(found)

    def kill(self) -> None:
        """Kills a rank."""
        self._signal(signal.SIGKILL)

    def suspend(self) -> None:
        """Stops a rank, which the others wait for until the timeout of the collectives."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        wait_until(lambda: bool(self.workers()) or self.job.process.poll() is not None, "a worker", DEADLINE_S)
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(self.random.choice(self.workers()), number)

    def resize(self) -> None:
        """Lets a host come or go."""
        self._say(self.random.choice([slots for slots in (1, 2, 3) if slots != self.slots]))

    def stop_and_start(self) -> None:
        """Ends the job, as a user or a scheduler does, and starts it again."""
        number = self.random.choice([signal.SIGINT, signal.SIGTERM])
        self.job.process.send_signal(number)
        # By the signal itself if the launcher was about to leave.
        self.finish((0, 128 + number, -number))
        if not (self.folder / "result.npz").exists():
            self.run += 1
            self.job = self._start()

    def finish(self, codes: tuple[int, ...]) -> None:
        """Waits for the end of the launcher, and keeps what it showed."""
        ended = self.job.end(DEADLINE_S)
        assert ended.code in codes, f"{self.done}: {ended.code}\n{ended.stdout}\n{ended.stderr}"
        self.told[self.run] = ended.stdout
        wait_until(lambda: self.job.left() == [], f"the end of all processes, after {self.done}", 15)

    def happen(self) -> None:
        """Waits a random time, and lets something happen."""
        faults: list[Callable[[], None]] = [self.kill, self.kill, self.suspend, self.resize, self.stop_and_start]
        fault = self.random.choice(faults)
        pause_s = self.random.uniform(0, 12)
        self.done.append(f"{fault.__name__} after {pause_s:.1f} s")
        time.sleep(longer(pause_s))
        fault()

    def attempts(self) -> list[str]:
        """Returns the runs and attempts that trained a step, in order."""
        return sorted({path.name.split(".", 1)[1].rpartition(".")[0] for path in self.folder.glob("steps.*")})


def result(folder: Path) -> list[Any]:
    with np.load(folder / "result.npz") as values:
        return [values[name] for name in values.files]


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
    chaos = Chaos(tmp_path, seed)
    try:
        for _ in range(FAULTS):
            chaos.happen()
        (tmp_path / "calm").touch()
        chaos.finish((0,))
    finally:
        chaos.job.sweep()
    require_each_row_once(*(rows_by_step(tmp_path.glob(f"steps.{one}.*")) for one in chaos.attempts()))
    for value, wanted in zip(result(tmp_path), alone, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6, err_msg=str(chaos.done))
    for path in tmp_path.glob("steps.*"):
        run, attempt, rank = map(int, path.name.split(".")[1:])
        shown = [int(n) for n in re.findall(rf"line {run} {attempt} {rank} (\d+)$", chaos.told[run], re.MULTILINE)]
        assert shown == list(range(len(shown))) and len(shown) >= len(path.read_text().splitlines()), (path, chaos.done)
