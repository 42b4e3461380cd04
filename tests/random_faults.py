"""Random faults of an elastic job, and what must hold afterwards: each row once, equal results, no output lost."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from counted_rows import RESULT, SETUP, require_each_row_once, rows_by_step
from patience import longer

DEADLINE_S = 300.0
FAULTS = 3
VARIABLES = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}

TRAIN = f"""
{SETUP}
import itertools
run = int(sys.argv[2])
steps = (here / f"steps.{{run:02}}.{{attempt:02}}.{{rank}}").open("w", buffering=1)
(here / f"host.{{run:02}}.{{attempt:02}}.{{rank}}").write_text(os.uname().nodename)


lines = itertools.count()  # Of this process: an attribute of the callback would be in the backup.


class Slow(keras.callbacks.Callback):
    "Prints and writes each step, and is slow until no more faults come."
    epoch = 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        print("line", run, attempt, rank, next(lines), flush=True)
        write_step(steps, self.epoch * 12 + batch, self.model)
        time.sleep(0 if (here / "calm").exists() else 0.6)


# The steps are written before the backup that has them.
history = model.fit(data, epochs=3, verbose=0, callbacks=[Slow(), BackupAndResume(here / "backup", save_freq=2)])
{RESULT}
"""


class Chaos(ABC):
    """A job that trains in a folder with a number of workers that changes, and what happens to it.

    Args:
        folder: Where the workers write; all hosts see it.
        seed: Chooses the faults and their moments.
    """

    def __init__(self, folder: Path, seed: int):
        self.folder, self.random = folder, random.Random(seed)
        self.run, self.done = 0, []
        self.job: Any = None
        self.told: dict[int, str] = {}

    @property
    @abstractmethod
    def faults(self) -> list[Callable[[], None]]:
        """What may happen, as often as it stands here."""

    @abstractmethod
    def start(self) -> None:
        """Starts run number `run` of the job."""

    @abstractmethod
    def require_nothing_left(self) -> None:
        """Waits for the end of all processes of the job."""

    def finish(self, codes: tuple[int, ...]) -> None:
        """Waits for the end of the launcher, and keeps in `told` what it showed."""
        ended = self.job.end(DEADLINE_S)
        if self.run in self.told:  # It came to the end of its training when it was stopped.
            return
        assert ended.code in codes, f"{self.done}: {ended.code}\n{ended.stdout}\n{ended.stderr}"
        self.told[self.run] = ended.stdout
        self.require_nothing_left()

    def stop_and_start(self) -> None:
        """Ends the job, as a user or a scheduler does, and starts it again."""
        number = self.random.choice([signal.SIGINT, signal.SIGTERM])
        self.job.process.send_signal(number)
        # By the signal itself if the launcher was about to leave.
        self.finish((0, 128 + number, -number))
        if not (self.folder / "result.npz").exists():
            self.run += 1
            self.start()

    @abstractmethod
    def workers(self) -> list[int]:
        """Waits for a rank that is alive; returns the processes of those, none if the job has ended."""

    def kill(self) -> None:
        """Kills a rank."""
        if workers := self.workers():
            _send(self.random.choice(workers), signal.SIGKILL)

    def suspend(self) -> None:
        """Stops a rank, which the others wait for until the timeout of the collectives; one alone for a while."""
        if workers := self.workers():
            pid = self.random.choice(workers)
            _send(pid, signal.SIGSTOP)
            if len(workers) == 1:
                time.sleep(5)
                _send(pid, signal.SIGCONT)

    def happen(self) -> None:
        """Waits a random time, and lets something happen."""
        fault = self.random.choice(self.faults)
        pause_s = self.random.uniform(0, 12)
        self.done.append(f"{fault.__name__} after {pause_s:.1f} s")
        time.sleep(longer(pause_s))
        fault()

    def has_lost_output(self, rank: tuple[int, int, int]) -> bool:
        """Whether a rank, by its run, attempt and number, was on a host from which nothing came any more."""
        return False

    def require_the_end_of(self, alone: list[Any]) -> None:
        """Checks what the job wrote and showed.

        Args:
            alone: What one worker comes to, that nothing happens to.
        """
        attempts = sorted({path.name.split(".", 1)[1].rpartition(".")[0] for path in self.folder.glob("steps.*")})
        require_each_row_once(*(rows_by_step(self.folder.glob(f"steps.{one}.*")) for one in attempts))
        for value, wanted in zip(result(self.folder), alone, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6, err_msg=str(self.done))
        for path in self.folder.glob("steps.*"):
            run, attempt, rank = map(int, path.name.split(".")[1:])
            found = re.findall(rf"line {run} {attempt} {rank} (\d+)$", self.told[run], re.MULTILINE)
            shown, written = [int(number) for number in found], len(path.read_text().splitlines())
            assert shown == list(range(len(shown))), (path, self.done)
            assert len(shown) >= written or self.has_lost_output((run, attempt, rank)), (path, self.done)


def in_folder(folder: Path, script: str) -> str:
    """Returns a script that works in a folder, which all hosts see."""
    return f"import os\nos.chdir({str(folder)!r})\n{script}"


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def result(folder: Path) -> list[Any]:
    """Returns the weights at the end of a job, and the variables of its optimizer."""
    with np.load(folder / "result.npz") as values:
        return [values[name] for name in values.files]
