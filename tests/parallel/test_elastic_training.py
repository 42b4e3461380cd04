"""Real training whose number of workers changes: no element twice, and the results of the undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted_rows import RESULT, ROWS, SETUP, STEPS, require_each_row_once, rows_by_step
from job_process import Job, job, wait_until, write_script
from rank_jobs import engine_options, strategy_of

# Perhaps Horovod has to be built first.
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]

DEADLINE_S = 300.0

TRAIN = f"""
{SETUP}
kill_at, wait_at = int(sys.argv[2]), int(sys.argv[3])
steps = (here / f"steps.{{attempt}}.{{rank}}").open("w", buffering=1)


class Fate(keras.callbacks.Callback):
    epoch = 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        step = self.epoch * 12 + batch
        write_step(steps, step, self.model)
        if attempt == 0 and rank == 2 and step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 0 and step >= wait_at:
            (here / "waits").touch()
            time.sleep(0.3)  # until the launcher asks for a backup


history = model.fit(data, epochs=3, verbose=0, callbacks=[BackupAndResume(here / "backup", save_freq=5), Fate()])
{RESULT}
"""


def start(request: pytest.FixtureRequest, folder: Path, engine: str, *words: str, fate: tuple[int, int]) -> Job:
    folder.mkdir(exist_ok=True)
    options, variables = engine_options(request.getfixturevalue, engine)
    variables = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    words = (*options, *words, "--log-dir", "logs", "--threads-per-worker", "1", write_script(folder, TRAIN))
    return Job(*words, strategy_of(engine), *map(str, fate), cwd=folder, **variables)


def result(folder: Path) -> tuple[list[Any], dict[str, Any]]:
    with np.load(folder / "result.npz") as values:
        weights = [values[name] for name in values.files]
    return weights, json.loads((folder / "history.json").read_text())


def steps_of(folder: Path, attempt: int) -> dict[int, list[list[int]]]:
    """Returns the rows of each rank by step, as an attempt trained them."""
    return rows_by_step(folder.glob(f"steps.{attempt}.*"))


def alone(request: pytest.FixtureRequest, folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """Returns what one worker comes to."""
    running = start(request, folder, "multiworker", "-np", "1", fate=(-1, STEPS))
    try:
        assert running.end(DEADLINE_S).code == 0, running.stderr_path.read_text()
    finally:
        running.sweep()
    return result(folder)


ENGINES = ["multiworker", pytest.param("horovod", marks=[pytest.mark.horovod, pytest.mark.thorough])]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_worker(request: pytest.FixtureRequest, tmp_path: Path, engine: str) -> None:
    kill_at = 17
    elastic = start(request, tmp_path / "elastic", engine, "-np", "2:3", fate=(kill_at, STEPS))
    try:
        ended = elastic.end(DEADLINE_S)
        assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
        assert elastic.left() == []
    finally:
        elastic.sweep()
    assert "the job continues with 2 workers instead of 3" in ended.stderr
    folder = tmp_path / "elastic"
    first, second = steps_of(folder, 0), steps_of(folder, 1)
    assert min(second) == 15, "at most the steps since the last backup are lost"
    assert {len(ranks) for ranks in second.values()} == {2}
    require_each_row_once(first, second)

    # The same changes at the same steps, on purpose: three workers up to the backup, then two.
    purpose = tmp_path / "purpose"
    three = start(request, purpose, engine, "-np", "3", fate=(kill_at, STEPS))
    try:
        assert three.end(DEADLINE_S).code == 137, three.stderr_path.read_text()
    finally:
        three.sweep()
    two = start(request, purpose, engine, "-np", "2", fate=(-1, STEPS))
    try:
        assert two.end(DEADLINE_S).code == 0, two.stderr_path.read_text()
    finally:
        two.sweep()
    (weights, history), (expected, expected_history) = result(folder), result(purpose)
    for value, wanted in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(value, wanted)
    assert history == expected_history and history["workers"] == 2
    assert history["rows"] == [ROWS] * 3


@pytest.mark.thorough  # Jobs over ssh grow each time (tests/integration/test_ssh_elastic.py).
@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_grows(request: pytest.FixtureRequest, tmp_path: Path, engine: str) -> None:
    _, expected = alone(request, tmp_path / "alone")
    folder = tmp_path / "elastic"
    folder.mkdir()
    hosts, script = folder / "hosts", folder / "hosts.sh"
    hosts.write_text("localhost:2")
    script.write_text(f"#!/bin/sh\ncat {hosts}\n")
    script.chmod(0o755)
    words = ("-np", "1:3", "--host-discovery-script", str(script), "--cool-down", "1")
    elastic = start(request, folder, engine, *words, fate=(-1, 14))
    try:
        wait_until((folder / "waits").exists, "the first epoch", DEADLINE_S)
        hosts.write_text("localhost:3")
        ended = elastic.end(DEADLINE_S)
        assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
        assert elastic.left() == []
    finally:
        elastic.sweep()
    assert "the job continues with 3 workers instead of 2" in ended.stderr and "failed" not in ended.stderr
    first, second = steps_of(folder, 0), steps_of(folder, 1)
    assert max(first) + 1 == min(second), "no step is lost, and none is run twice"
    assert {len(ranks) for ranks in first.values()} == {2} and {len(ranks) for ranks in second.values()} == {3}
    require_each_row_once(first, second)
    _, history = result(folder)
    assert history["workers"] == 3
    np.testing.assert_allclose(history["loss"], expected["loss"], atol=1e-6, rtol=0)


def test_fit_without_a_backup_is_refused(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    code = TRAIN.replace('BackupAndResume(here / "backup", save_freq=5), ', "")
    words = ("-np", "1:2", "--threads-per-worker", "1", write_script(tmp_path, code), "multiworker", "-1", "999")
    with job(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3") as running:
        ended = running.end(DEADLINE_S)
        assert running.left() == []
    assert ended.code == 1
    assert (
        "`callbacks` of `fit` must have a BackupAndResume in a job whose number of workers may change." in ended.stderr
    )
    assert "Add it: model.fit(..., callbacks=[tfdistkit.callbacks.BackupAndResume(" in ended.stderr
    assert not [path.name for path in tmp_path.glob("steps.*") if path.read_text()]


REQUESTED = """
import os, pathlib, signal, sys, time
import keras, numpy as np
import tfdistkit
from tfdistkit.callbacks import BackupAndResume

class Ask(keras.callbacks.Callback):
    "Sends the request of the launcher to this process, in the middle or after the last step."
    def on_train_batch_end(self, batch, logs=None):
        if sys.argv[1] == "within" and batch == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
    def on_train_end(self, logs=None):
        if sys.argv[1] == "after":
            os.kill(os.getpid(), signal.SIGUSR1)

os.kill(os.getpid(), signal.SIGUSR1)  # not in `fit`: nothing happens
x = np.ones((40, 2), "float32")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
backup = BackupAndResume("backup", grace_s=0.2)
model.fit(x, x[:, :1], batch_size=2, verbose=0, callbacks=[Ask(), backup])
time.sleep(0.5)  # longer than `grace_s`: a request kills no process
os.kill(os.getpid(), signal.SIGUSR1)
print("done", flush=True)
"""


@pytest.mark.parametrize(("when", "code", "has_backup"), [("within", -signal.SIGUSR1, True), ("after", 0, False)])
def test_a_request_for_a_backup_ends_a_process_only_with_one(
    tmp_path: Path, when: str, code: int, has_backup: bool
) -> None:
    words = [sys.executable, "-m", "tfdistkit.worker", write_script(tmp_path, REQUESTED), when]
    variables = {**os.environ, "TFDISTKIT_ELASTIC": "1:2", "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run(words, cwd=tmp_path, env=variables, timeout=240, capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert ("done" in ended.stdout) == (not has_backup)
    assert (tmp_path / "backup" / "training.backup").exists() == has_backup
