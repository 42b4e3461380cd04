"""`tfdistkit.data.shard` under `fit` and `evaluate`, in real jobs of two workers."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tfdistkit.data.writing.sources import open_source
from tfdistkit.data.writing.writer import write_shards

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(3200)]

# Rows and global batch size: even, with remainders, uneven shards, and fewer rows than workers.
CASES = [(64, 16), (97, 32), (7, 4), (1, 4)]
PLACES = ("none", "before", "after")
# Other calls that give the same steps, for some of the cases.
WAYS = [(97, 32, "batch"), (97, 32, "padded"), (97, 32, "padded batch"), (97, 32, "arrays"), (1, 4, "padded")]
EPOCHS = 2

TRAIN = """
import json, pathlib, sys
import keras, numpy as np
import tensorflow as tf
import tfdistkit

cases, places, ways, epochs, files = json.loads(sys.argv[2])
strategy = tfdistkit.strategy("auto")


class SeenRows(keras.metrics.Metric):
    '''How often each row was seen, by all ranks.'''

    def __init__(self, rows):
        super().__init__(name="seen")
        self.times = self.add_variable((rows,), initializer="zeros", name="times")

    def update_state(self, numbers, predictions, sample_weight=None):
        numbers = keras.ops.cast(keras.ops.reshape(numbers, (-1,)), "int32")
        self.times.assign_add(keras.ops.sum(keras.ops.one_hot(numbers, self.times.shape[0]), axis=0))

    def result(self):
        return keras.ops.sum(self.times)


def dataset(rows, batch_size, place):
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    arrays = (x, np.arange(rows, dtype="float32")[:, None])
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    if place == "files":
        rows = tfdistkit.data.from_files(files, shuffle=True, seed=3, buffer_size=40)
        return rows.map(lambda row: (row["x"], row["y"])).batch(batch_size)
    if place == "arrays":
        return tfdistkit.data.from_arrays(arrays).batch(batch_size)
    if place == "padded":
        return tfdistkit.data.shard(dataset, even_steps="pad").batch(batch_size)
    if place in ("batch", "padded batch"):
        even_steps = "pad" if place == "padded batch" else None
        return tfdistkit.data.shard(dataset.batch(batch_size), "batch", even_steps=even_steps)
    if place == "before":
        return tfdistkit.data.shard(dataset).batch(batch_size)
    dataset = dataset.batch(batch_size)
    return tfdistkit.data.shard(dataset) if place == "after" else dataset


def compiled(steps_per_execution=1):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(1)])
        options = dict(metrics=[SeenRows(most_rows)], steps_per_execution=steps_per_execution)
        model.compile(keras.optimizers.Adam(0.01), lambda y, p: keras.ops.square(p - y / most_rows), **options)
        model.optimizer.build(model.trainable_variables)
    return model, [variable.numpy() for variable in model.variables + model.optimizer.variables]


def measure(model, start, rows, batch_size, place):
    for variable, value in zip(model.variables + model.optimizer.variables, start):
        variable.assign(value)
    data = dataset(rows, batch_size, place)
    history = model.fit(data, epochs=epochs, verbose=0)
    seen = model.metrics[-1].metrics[0].times.value.numpy().tolist()
    assert not any(seen[rows:])
    loss, rows_seen = model.evaluate(data, verbose=0)
    return dict(loss=history.history["loss"], seen=seen[:rows], evaluated=loss, rows_evaluated=rows_seen,
        steps=int(model.optimizer.iterations), kernel=model.layers[0].kernel.numpy().tolist())


keras.utils.set_random_seed(0)
most_rows = max(rows for rows, batch_size in cases)
# One model for all cases: tracing a step takes far longer than running it.
model, start = compiled()
found = {}
for rows, batch_size, place in [(*case, place) for case in cases for place in places] + ways + [(97, 32, "files")]:
    found[f"{rows} {batch_size} {place}"] = measure(model, start, rows, batch_size, place)
found["97 32 before, executing 3"] = measure(compiled(3)[0], start, 97, 32, "before")
if tfdistkit.is_chief():
    pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return {workers: run(workers, tmp_path_factory.mktemp("shard")) for workers in (1, 2)}


def written(folder: pathlib.Path) -> pathlib.Path:
    """The rows of the script, in 4 files."""
    x = np.random.default_rng(0).normal(size=(97, 4)).astype("float32")
    np.savez(folder / "rows.npz", x=x, y=np.arange(97, dtype="float32")[:, None])
    write_shards(open_source(str(folder / "rows.npz"), "train", None), folder / "rows", 4, lambda line: None)
    return folder / "rows"


def run(workers: int, folder: pathlib.Path) -> dict[str, Any]:
    script, result = folder / "train.py", folder / "found.json"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "tfdistkit", "run", "-np", str(workers), "--timeout", "1500", str(script)]
    command += [str(result), json.dumps([CASES, PLACES, WAYS, EPOCHS, str(written(folder))])]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1540, check=False)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "ran out of data" not in job.stderr
    found: dict[str, Any] = json.loads(result.read_text())
    return found


close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("rows", "batch_size", "place"),
    [(*case, place) for case in CASES for place in PLACES] + WAYS,
)
def test_an_epoch_sees_each_row_once(measured: dict[int, Any], rows: int, batch_size: int, place: str) -> None:
    found = measured[2][f"{rows} {batch_size} {place}"]
    assert found["seen"] == [1.0] * rows
    assert found["rows_evaluated"] == rows


@pytest.mark.parametrize(
    ("rows", "batch_size", "place"),
    [(*case, place) for case in CASES for place in ("none", "before")] + WAYS,
)
def test_two_workers_compute_what_one_computes(
    measured: dict[int, Any], rows: int, batch_size: int, place: str
) -> None:
    one, two = measured[1][f"{rows} {batch_size} none"], measured[2][f"{rows} {batch_size} {place}"]
    assert two["steps"] == one["steps"] == EPOCHS * -(-rows // batch_size)
    for what in ("loss", "evaluated", "kernel"):
        close(two[what], one[what])


def test_files_read_by_two_are_shuffled_as_for_one(measured: dict[int, Any]) -> None:
    one, two = measured[1]["97 32 files"], measured[2]["97 32 files"]
    assert one["seen"] == two["seen"] == [1.0] * 97 and one["steps"] == two["steps"]
    for what in ("loss", "evaluated", "kernel"):
        close(two[what], one[what])
    # The shuffle order differs from the order of the rows, and so do the weights.
    assert not np.allclose(one["kernel"], measured[1]["97 32 none"]["kernel"], rtol=1e-3)


def test_several_steps_in_one_execution(measured: dict[int, Any]) -> None:
    one, two = measured[1]["97 32 none"], measured[2]["97 32 before, executing 3"]
    assert two["steps"] == one["steps"] and two["seen"] == [1.0] * 97
    close(two["kernel"], one["kernel"])


@pytest.mark.parametrize(("rows", "batch_size"), CASES)
def test_one_process_has_all_rows(measured: dict[int, Any], rows: int, batch_size: int) -> None:
    plain = measured[1][f"{rows} {batch_size} none"]
    for place in ("before", "after"):
        assert measured[1][f"{rows} {batch_size} {place}"] == plain
