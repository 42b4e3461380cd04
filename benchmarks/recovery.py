"""How long a job whose number of workers may change takes to train on: after a lost worker, and when a host comes.

Each round starts a job of 2 workers, kills one of 3 workers that train (SIGKILL), and adds a third worker to two. The
time from the kill, or from the new line of the discovery script, to the first step afterwards is compared with that
from the start of the job of 2 to its first step, most of which is the import of TensorFlow. Goals: at most 15 s more
after a kill; lost work at most one backup interval after a kill, none when a host comes. Each row is trained once an
epoch, or the benchmark ends with an error.
Run: python benchmarks/recovery.py
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "parallel"))
from counted_rows import SETUP, STEPS, require_each_row_once, rows_by_step
from job_process import Job, wait_until, write_script

from tfdistkit.report.events import read_events

BACKUP_EVERY = 5
_TRAIN = f"""
{SETUP}
steps = (here / f"steps.{{attempt}}.{{rank}}").open("w", buffering=1)

class Slow(keras.callbacks.Callback):
    "Writes each step, and is slow until the benchmark has seen enough."
    epoch = 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        write_step(steps, self.epoch * 12 + batch, self.model)
        time.sleep(0 if (here / "calm").exists() else 0.3)

backup = BackupAndResume(here / "backup", save_freq={BACKUP_EVERY})
model.fit(data, epochs=3, verbose=0, callbacks=[Slow(), backup])
"""
_VARIABLES = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}


def trained(folder: Path, attempt: int) -> dict[int, list[list[int]]]:
    """Returns the rows that each rank trained in each step of an attempt."""
    return rows_by_step(folder.glob(f"steps.{attempt}.*"))


def run(folder: Path, words: list[str], change: Callable[[Path, Job], None] | None) -> tuple[float, int, int]:
    """Runs a job to its end, with a change of its workers or without.

    Args:
        folder: An empty folder.
        words: The options of `tfdistkit run`.
        change: Lets workers come or go, when 13 steps have been trained.

    Returns:
        The seconds from the change (or from the start) to the end of the next first step; the steps that were trained
        twice; the number of workers at the end.
    """
    script = write_script(folder, _TRAIN)
    job = Job(*words, "--threads-per-worker", "1", "--log-dir", "logs", script, "multiworker", cwd=folder, **_VARIABLES)
    try:
        if change is None:
            start = job.started
        else:
            wait_until(lambda: len(trained(folder, 0)) > 13, "13 steps", 120)
            start = time.monotonic()
            change(folder, job)
        attempt = 0 if change is None else 1
        wait_until(lambda: len(trained(folder, attempt)) > 0, "the first step", 120)
        seconds = time.monotonic() - start
        (folder / "calm").touch()
        ended = job.end(120)
        assert ended.code == 0, ended.stderr
    finally:
        job.sweep()
    attempts = [trained(folder, number) for number in range(attempt + 1)]
    require_each_row_once(*attempts)
    assert max(attempts[-1]) == STEPS - 1
    return seconds, sum(map(len, attempts)) - STEPS, len(attempts[-1][STEPS - 1])


def kill(folder: Path, job: Job) -> None:
    """Kills the last rank."""
    [pid] = [event["pid"] for event in read_events(folder / "logs") if event.get("process") == "rank 2"][:1]
    os.kill(pid, signal.SIGKILL)


def grow(folder: Path, job: Job) -> None:
    """Lets the discovery script print one slot more."""
    (folder / "hosts").write_text("localhost:3\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    results: dict[str, list[tuple[float, int, int]]] = {"start": [], "kill": [], "grow": []}
    for _ in range(args.rounds):
        for name, made in results.items():
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                (folder / "hosts").write_text("localhost:2\n")
                (folder / "hosts.sh").write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
                (folder / "hosts.sh").chmod(0o755)
                discovery = ["--host-discovery-script", str(folder / "hosts.sh"), "--cool-down", "1"]
                words = {"start": ["-np", "2"], "kill": ["-np", "2:3"], "grow": ["-np", "2:3", *discovery]}[name]
                made.append(run(folder, words, {"kill": kill, "grow": grow}.get(name)))
    starts = [seconds for seconds, _, _ in results["start"]]
    for name, what in (("start", "2 workers start"), ("kill", "3 -> 2 by SIGKILL"), ("grow", "2 -> 3 by discovery")):
        seconds = [one for one, _, _ in results[name]]
        more = [one - start for one, start in zip(seconds, starts)]
        lost, workers = [steps for _, steps, _ in results[name]], {number for _, _, number in results[name]}
        print(
            f"{what:<20} first step after {statistics.median(seconds):5.1f} s, {statistics.median(more):+5.1f} s "
            f"({min(more):+.1f} to {max(more):+.1f}); steps trained twice: {statistics.median(lost):g} (at most "
            f"{max(lost)}); workers at the end: {workers}; {args.rounds} rounds"
        )


if __name__ == "__main__":
    main()
