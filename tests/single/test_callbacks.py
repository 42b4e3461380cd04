"""`ChiefCheckpoint` and `ChiefOnly` in one process."""

from __future__ import annotations

import errno
import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest

import tfdistkit
from tfdistkit.callbacks import ChiefCheckpoint, ChiefOnly

pytestmark = pytest.mark.tensorflow


def train(callbacks: list[keras.callbacks.Callback], epochs: int = 3) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    y = x[:, :1] * 2
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.fit(x, y, batch_size=8, epochs=epochs, validation_split=0.2, callbacks=callbacks, verbose=0)
    return model


def as_second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["localhost:12345", "localhost:12346"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}}))


def weights_in(folder: pathlib.Path) -> dict[str, list[np.ndarray]]:
    """Loads every file of a folder: weights and optimizer state."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        if path.suffix == ".keras":
            model = keras.models.load_model(path)
        else:
            model = train([], epochs=1)
            model.load_weights(path)
        variables = [*model.weights, *model.optimizer.variables]
        found[str(path.relative_to(folder))] = [keras.ops.convert_to_numpy(v) for v in variables]
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("model.keras", {}),
        ("model.weights.h5", {"save_weights_only": True}),
        ("best.keras", {"save_best_only": True}),
        ("best.keras", {"save_best_only": True, "monitor": "loss", "mode": "max"}),
        ("best.keras", {"save_best_only": True, "initial_value_threshold": 1e-9}),
        ("deep/{epoch:02d}-{val_loss:.2f}.keras", {}),
        ("{epoch}/{batch:02d}.weights.h5", {"save_weights_only": True, "save_freq": 3}),
    ],
)
def test_saves_what_model_checkpoint_saves(tmp_path: pathlib.Path, name: str, options: dict[str, Any]) -> None:
    (tmp_path / "keras").mkdir()
    (tmp_path / "ours").mkdir()
    theirs = keras.callbacks.ModelCheckpoint(tmp_path / "keras" / name, **options)
    ours = ChiefCheckpoint(tmp_path / "ours" / name, **options)
    train([theirs, ours])
    expected, found = weights_in(tmp_path / "keras"), weights_in(tmp_path / "ours")
    assert list(found) == list(expected)
    assert ours.best == theirs.best
    for key in expected:
        for a, b in zip(expected[key], found[key], strict=True):
            np.testing.assert_array_equal(a, b)


def test_prints_the_lines_of_model_checkpoint(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for kind in (keras.callbacks.ModelCheckpoint, ChiefCheckpoint):
        train([kind(tmp_path / "{epoch}.keras", verbose=1)], epochs=1)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "saving model" in printed[1]


def test_other_ranks_write_and_print_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_second_of_two(monkeypatch)
    checkpoint = ChiefCheckpoint(tmp_path / "deep" / "model.keras", verbose=1, save_best_only=True)
    train([checkpoint])
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
    assert checkpoint.filepath == str(tmp_path / "deep" / "model.keras")
    assert checkpoint.best is not None  # it decides as the chief does


def test_a_folder_under_the_name_of_the_file_is_an_error(tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.keras").mkdir()
    with pytest.raises(OSError, match="non-directory"):
        train([ChiefCheckpoint(tmp_path / "model.keras")])
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.keras"]


def test_invalid_paths_are_errors() -> None:
    with pytest.raises(tfdistkit.errors.OptionError, match="gs://bucket/model.keras(.|\n)*mounted"):
        ChiefCheckpoint("gs://bucket/model.keras")
    with pytest.raises(ValueError, match="keras"):
        ChiefCheckpoint("model.txt")
    with pytest.raises(ValueError, match="weights.h5"):
        ChiefCheckpoint("model.keras", save_weights_only=True)


FULL_DISK = """
import resource, sys
import keras, numpy as np
from tfdistkit.callbacks import ChiefCheckpoint
path = sys.argv[1]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(50_000), keras.layers.Dense(1)])
model.compile("sgd", "mse")
fit = lambda: model.fit(
    np.zeros((4, 4)), np.zeros((4, 1)), verbose=0,
    callbacks=[ChiefCheckpoint(path, save_weights_only=path.endswith("h5"))])
fit()
before = open(path, "rb").read()
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))  # what a full disk is to a program
try:
    fit()
except OSError as error:
    print("told:", error, flush=True)
assert open(path, "rb").read() == before
"""


@pytest.mark.parametrize("name", ("model.keras", "model.weights.h5"))
def test_a_full_disk_is_an_error_and_the_previous_file_stays(tmp_path: pathlib.Path, name: str) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / name)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "told: " in run.stdout and "ChiefCheckpoint could not write" in run.stdout, run.stdout + run.stderr
    assert str(tmp_path / name) in run.stdout and "AssertionError" not in run.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_too_little_space_is_an_error_before_writing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, used, _ = shutil.disk_usage(tmp_path)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(total, used, 50))
    with pytest.raises(OSError, match="could not write(.|\n)*50 bytes free") as caught:
        train([ChiefCheckpoint(tmp_path / "model.weights.h5", save_weights_only=True)])
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


class Recorder(keras.callbacks.Callback):
    """Records the name of every method that is called on it."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["calls"] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("on_", "set_")):
            object.__getattribute__(self, "calls").append(name)
        return super().__getattribute__(name)


def test_chief_only_runs_everything_on_the_chief() -> None:
    inside, beside = Recorder(), Recorder()
    model = train([ChiefOnly(inside), beside])
    outer = [name for name in beside.calls if name not in ("on_batch_begin", "on_batch_end")]
    assert [name for name in inside.calls if name in set(outer)] == outer
    assert {"set_model", "set_params", "on_train_begin", "on_train_batch_end", "on_test_end"} <= set(inside.calls)
    assert inside.model is model and inside.params == beside.params


def test_chief_only_runs_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    as_second_of_two(monkeypatch)
    inside = Recorder()
    train([ChiefOnly(inside)])
    assert inside.calls == []


def test_chief_only_csv_logger_writes_the_same_file(tmp_path: pathlib.Path) -> None:
    logger = keras.callbacks.CSVLogger
    train([ChiefOnly(logger(str(tmp_path / "ours.csv"))), logger(str(tmp_path / "keras.csv"))])
    assert (tmp_path / "ours.csv").read_text() == (tmp_path / "keras.csv").read_text() != ""


CALLBACKS = keras.callbacks


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (CALLBACKS.EarlyStopping(), "stops training"),
        (CALLBACKS.TerminateOnNaN(), "stops training"),
        (CALLBACKS.ReduceLROnPlateau(), "learning rate"),
        (CALLBACKS.LearningRateScheduler(lambda epoch: 0.1), "learning rate"),
        (CALLBACKS.SwapEMAWeights(), "weights"),
        (CALLBACKS.BackupAndRestore("backup"), "weights"),
        (CALLBACKS.ModelCheckpoint("model.keras"), "ChiefCheckpoint"),
        (CALLBACKS.ProgbarLogger(), "one progress bar"),
        (len, "must be a keras.callbacks.Callback"),
    ],
)
def test_chief_only_refuses_what_every_rank_must_run(callback: Any, message: str) -> None:
    with pytest.raises(tfdistkit.errors.OptionError, match=message):
        ChiefOnly(callback)


class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.stop_training = True


class Slows(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.model.optimizer.learning_rate = 0.01


@pytest.mark.parametrize(("callback", "message"), [(Stops(), "stop_training"), (Slows(), "learning rate")])
def test_chief_only_catches_changes_to_training(callback: Any, message: str) -> None:
    with pytest.raises(tfdistkit.errors.UnsupportedError, match=message):
        train([ChiefOnly(callback)])
    train([callback], epochs=1)


def test_chief_only_lets_batches_run_ahead_if_the_callback_does() -> None:
    assert ChiefOnly(CALLBACKS.CSVLogger("log.csv")).async_safe
    assert not ChiefOnly(Stops()).async_safe
