"""`ChiefCheckpoint` in real jobs of two ranks, and against kill -9."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
from job_process import write_script
from rank_jobs import ENGINES, Provide, start_ranks

# The first test waits for a job with all cases, and perhaps for Horovod to be built.
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]

TRAIN = """
import os, pathlib, resource, sys
import keras, numpy as np
import tfdistkit
from tfdistkit.callbacks import ChiefCheckpoint, ChiefOnly

folder, cases = pathlib.Path(sys.argv[1]), sys.argv[2:]
strategy = tfdistkit.strategy("auto")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x[:, :1] > 0).astype("float32")


class Counts(keras.layers.Layer):
    def build(self, shape):
        options = dict(synchronization="on_read", aggregation="sum", trainable=False)
        self.rows = keras.Variable(0.0, name="rows", **options)

    def call(self, inputs, training=False):
        if training:
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "float32"))
        return inputs


def train(case, folder):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.Input((4,)), keras.layers.Dense(8, activation="tanh")]
        layers += [keras.layers.BatchNormalization(synchronized=True)]
        layers += [Counts()] if case == "on_read" else []
        model = keras.Sequential([*layers, keras.layers.Dense(1, activation="sigmoid")])
        metrics = ["accuracy", keras.metrics.AUC()]
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        model.compile(optimizer, "binary_crossentropy", metrics=metrics)
    if case == "full_disk" and tfdistkit.is_chief():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    callbacks = [
        ChiefCheckpoint(folder / "deep" / "{epoch:02d}.keras"),
        ChiefCheckpoint(folder / "best.keras", save_best_only=True, monitor="val_accuracy", verbose=1),
        ChiefOnly(keras.callbacks.CSVLogger(folder / "log.csv")),
    ]
    if case == "plain":
        callbacks += [ChiefCheckpoint(folder / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=3)]
    model.fit(x, y, batch_size=16, epochs=3, validation_data=(x, y), callbacks=callbacks)
    model.evaluate(x, y, batch_size=16)
    model.predict(x, batch_size=16)
    print(f"end of rank {tfdistkit.rank()}")


for case in cases:
    (folder / case).mkdir(exist_ok=True)
    train(case, folder / case)
"""

# Loads checkpoints without tfdistkit.
LOAD = """
import json, sys
sys.modules["tfdistkit"] = None
import keras
models = [keras.models.load_model(path) for path in sys.argv[1:]]
variables = [v for model in models for v in (*model.weights, *model.optimizer.variables)]
print(json.dumps([keras.ops.convert_to_numpy(v).tolist() for v in variables]))
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    """A job that has ended; its files are in `folder/<case>`, its leftovers in `scratch`."""

    folder: pathlib.Path
    scratch: pathlib.Path
    code: int
    stdout: str
    output: str


def run(provide: Provide, engine: str, ranks: int, folder: pathlib.Path, *cases: str) -> Ended:
    (folder / "files").mkdir(parents=True)
    script = write_script(folder, TRAIN)
    words = ["--timeout", "240", script, str(folder / "files"), *cases]
    with start_ranks(provide, engine, words, folder, ranks) as running:
        ended = running.end(300)
        assert running.left() == []
    return Ended(folder / "files", folder, ended.code, ended.stdout, ended.stdout + ended.stderr)


@pytest.fixture(scope="module")
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One process."""
    ended = run(request.getfixturevalue, "multiworker", 1, tmp_path_factory.mktemp("one"), "plain")
    assert ended.code == 0, ended.output
    return ended


@pytest.fixture(scope="module", params=ENGINES)
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two ranks and all cases; the last case ends the job."""
    folder = tmp_path_factory.mktemp("two")
    return run(request.getfixturevalue, request.param, 2, folder, "plain", "on_read", "full_disk")


def files(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def checkpoints_in(folder: pathlib.Path) -> list[str]:
    return [name for name in files(folder) if name.endswith((".keras", ".h5"))]


@functools.cache
def load_without_us(folder: pathlib.Path) -> list[np.ndarray]:
    command = [sys.executable, "-c", LOAD, str(folder / "deep" / "03.keras"), str(folder / "best.keras")]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [np.asarray(value) for value in json.loads(loaded.stdout)]


def test_only_the_chief_writes_and_as_one_process_does(one: Ended, two: Ended) -> None:
    assert files(two.folder / "plain") == files(one.folder / "plain")
    assert {"deep/03.keras", "2-2.weights.h5", "log.csv"} <= set(files(two.folder / "plain"))
    assert [name for name in checkpoints_in(two.scratch) if not name.startswith("files/")] == []
    for a, b in zip(*(load_without_us(job.folder / "plain") for job in (two, one)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_job_prints_once(two: Ended) -> None:
    """One progress bar per job, in `fit`, `evaluate` and `predict`, and one line per save."""
    lines = two.stdout.replace("\r", "\n").splitlines()
    assert sum("Epoch 1/3" in line for line in lines) == 3  # one for each case
    assert any("ms/step" in line or "s/step" in line for line in lines if line.startswith("[0]"))
    assert any("saving model to" in line for line in lines if line.startswith("[0]"))
    assert [line for line in lines if line.startswith("[1]")] == ["[1] end of rank 1"] * 2


def test_state_spread_over_all_ranks_is_saved(two: Ended) -> None:
    with keras.utils.custom_object_scope({"Counts": Counts}):
        model = keras.models.load_model(two.folder / "on_read" / "deep" / "02.keras")
    rows = next(variable for variable in model.weights if variable.name == "rows")
    assert float(keras.ops.convert_to_numpy(rows)) == 128.0  # two epochs of 64 rows, half of them on each rank


class Counts(keras.layers.Layer):
    def build(self, shape: tuple[int | None, ...]) -> None:
        self.rows = keras.Variable(0.0, name="rows", trainable=False)

    def call(self, inputs: object) -> object:
        return inputs


def test_a_chief_that_cannot_write_ends_the_job_with_the_reason(two: Ended) -> None:
    assert two.code not in (0, 124), two.output  # 124: the launcher's time was up
    assert "ChiefCheckpoint could not write the checkpoint" in two.output, two.output
    assert checkpoints_in(two.folder / "full_disk") == []


SAVE_FOR_EVER = """
import sys
import keras, numpy as np
from tfdistkit.callbacks import ChiefCheckpoint
model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(4000), keras.layers.Dense(1)])
model.compile("sgd", "mse")
callback = ChiefCheckpoint(sys.argv[1], save_weights_only=sys.argv[1].endswith("h5"), save_freq=1)
x, y = np.zeros((4, 1000)), np.zeros((4, 1))
model.fit(x, y, verbose=0, callbacks=[callback])
print("ready", flush=True)
model.fit(x, y, verbose=0, batch_size=1, epochs=10_000, callbacks=[callback])
"""


@pytest.mark.parametrize("name", ("model.keras", "model.weights.h5"))
def test_a_kill_during_a_save_leaves_a_file_that_loads(tmp_path: pathlib.Path, name: str) -> None:
    target = tmp_path / name
    moments = random.Random(0)
    caught_in_the_middle = 0
    model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(4000), keras.layers.Dense(1)])
    for attempt in range(20):
        if attempt >= 3 and caught_in_the_middle:
            break
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(target)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as job:
            assert job.stdout is not None and job.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0.0, 0.5))
            job.send_signal(signal.SIGKILL)
            job.wait(timeout=30)
        caught_in_the_middle += any(entry.name.startswith(".tfdistkit-") for entry in tmp_path.iterdir())
        assert len(list(tmp_path.iterdir())) <= 2  # the next save removed what the one before left
        if name.endswith(".keras"):
            model = keras.models.load_model(target)
        else:
            model.load_weights(target)
        assert np.isfinite(keras.ops.convert_to_numpy(model.layers[0].kernel)).all()
    assert caught_in_the_middle > 0  # else this test shows nothing
