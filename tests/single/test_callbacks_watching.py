"""`ConsistencyCheck`, `StepTimer`, and the files of `ChiefCheckpoint`, in one process."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.callbacks import ChiefCheckpoint, ConsistencyCheck, StepTimer, load_checkpoint
from tfdistkit.callbacks.process_group import warn_once
from tfdistkit.errors import CheckpointError, OptionError

pytestmark = pytest.mark.tensorflow

SHARES = ("computing", "communication", "input", "callbacks")


def small(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse", **options)
    return model


def arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    return x, x[:, :1] * 2


def slow_dataset(seconds: float) -> tf.data.Dataset:
    def slow(batch: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return batch

    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(8)
    data = data.map(lambda x, y: (tf.numpy_function(slow, [x], tf.float32), y))
    return data.map(lambda x, y: (tf.ensure_shape(x, [None, 4]), y))


@pytest.mark.parametrize("options", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}], ids=str)
def test_timer_logs_the_shares(options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    expected = small(**options)
    expected.fit(*arrays(), batch_size=8, epochs=3, verbose=0)
    model = small(**options)
    history = model.fit(*arrays(), batch_size=8, epochs=3, verbose=0, callbacks=[StepTimer()]).history
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for epoch in range(3):
        assert abs(sum(history[key][epoch] for key in SHARES) - 100) < 1e-6
        assert all(history[key][epoch] >= 0 for key in SHARES)
    assert all(history["communication"][epoch] == 0 for epoch in range(3))
    assert history["examples_per_second"][1] > 0
    assert history["bytes_per_step"] == [0.0] * 3 and history["bytes_ratio"] == [1.0] * 3
    assert capsys.readouterr().out.count("examples/s, ") == 3


def test_timer_names_slow_data_and_slow_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    model = small()
    history = model.fit(slow_dataset(0.05), epochs=2, verbose=0, callbacks=[StepTimer()]).history
    assert history["input"][1] > 60
    assert 8 < history["examples_per_second"][1] < 160  # 40 rows in 5 waits of 0.05 s, at least
    printed = capsys.readouterr().out
    assert "Epoch 2: training waits for input: use `prefetch`" in printed

    sleep = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.05))
    history = model.fit(*arrays(), batch_size=8, epochs=2, verbose=0, callbacks=[sleep, StepTimer(verbose=0)]).history
    assert history["callbacks"][1] > 60 and history["input"][1] < 30
    assert "examples/s" not in capsys.readouterr().out


def test_check_with_one_replica_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "tfdistkit"):
        small().fit(*arrays(), verbose=0, epochs=2, callbacks=[ConsistencyCheck(every=1), ConsistencyCheck()])
    assert caplog.text.count("ConsistencyCheck has nothing to do") == 1


@pytest.mark.parametrize("options", [{"every": 0}, {"every": "3 seconds"}, {"action": "stop"}], ids=str)
def test_invalid_options_of_check_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="Received: "):
        ConsistencyCheck(**options)


def files(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_files_are_kept(tmp_path: pathlib.Path) -> None:
    for name in ("best.keras", "x.keras", "07-copy.keras"):
        (tmp_path / name).write_text("not ours")
    template = tmp_path / "{epoch:02d}.keras"
    small().fit(*arrays(), epochs=4, verbose=0, callbacks=[ChiefCheckpoint(template, keep=2)])
    assert files(tmp_path) == ["03.keras", "04.keras", "07-copy.keras", "best.keras", "x.keras"]
    # The next run counts the files of the run before, and removes the oldest first.
    small().fit(*arrays(), epochs=1, verbose=0, callbacks=[ChiefCheckpoint(template, keep=2)])
    assert files(tmp_path) == ["01.keras", "04.keras", "07-copy.keras", "best.keras", "x.keras"]
    model = load_checkpoint(template)
    assert int(model.optimizer.iterations) == 2  # the newest, not that with the highest number


@pytest.mark.parametrize("ending", ["keras", "weights.h5"])
def test_only_own_files_are_removed(tmp_path: pathlib.Path, ending: str) -> None:
    """Files that do not match `filepath`, and matching files of other writers, stay."""
    for name in ("2024-01-01", "1e3", "2024", "001", "+7"):
        (tmp_path / f"{name}.{ending}").write_text("not ours")
    weights_only = ending == "weights.h5"
    small().fit(
        *arrays(),
        verbose=0,
        epochs=1,
        callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / f"9{{epoch}}.{ending}", save_weights_only=weights_only)],
    )

    def save(epochs: int) -> None:
        saving = ChiefCheckpoint(tmp_path / f"{{epoch}}.{ending}", save_weights_only=weights_only, keep=1)
        small().fit(*arrays(), verbose=0, epochs=epochs, callbacks=[saving])

    save(2)
    shutil.copy2(tmp_path / f"2.{ending}", tmp_path / f"5.{ending}")
    save(3)  # As after a resume, in a process that has written none of them.
    left = {name.removesuffix(f".{ending}") for name in files(tmp_path)}
    assert left == {"+7", "001", "1e3", "2024", "2024-01-01", "3", "5", "91"}
    load_checkpoint(tmp_path / f"3.{ending}", small() if weights_only else None)
    loaded = small()
    loaded.load_weights(tmp_path / f"3.{ending}")


def test_the_best_file_is_kept(tmp_path: pathlib.Path) -> None:
    template = tmp_path / "{epoch}-{loss:.4f}.weights.h5"
    saving = ChiefCheckpoint(template, "loss", save_best_only=True, save_weights_only=True, keep=1)
    history = small().fit(*arrays(), epochs=4, verbose=0, callbacks=[saving]).history
    best = int(np.argmin(history["loss"]))
    assert files(tmp_path) == [f"{best + 1}-{history['loss'][best]:.4f}.weights.h5"]


@pytest.mark.parametrize(("keep", "name"), [(0, "{epoch}.keras"), (True, "{epoch}.keras"), (2, "model.keras")])
def test_invalid_keep_is_an_error(keep: Any, name: str) -> None:
    with pytest.raises(OptionError, match="`keep`"):
        ChiefCheckpoint(name, keep=keep)


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5"])
def test_intact_files_load_and_damaged_files_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    path, saved = tmp_path / name, small()
    weights_only = name.endswith("h5")
    saved.fit(*arrays(), verbose=0, callbacks=[ChiefCheckpoint(path, save_weights_only=weights_only)])
    theirs = tmp_path / f"theirs.{name.partition('.')[2]}"
    (saved.save_weights if weights_only else saved.save)(theirs)

    def load(path: pathlib.Path) -> keras.Model:
        return load_checkpoint(path, small()) if weights_only else load_checkpoint(path)

    for one in (path, theirs):  # Keras's own file has no checksum behind it, or the same.
        for a, b in zip(load(one).get_weights(), saved.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    if weights_only:
        small().load_weights(path)
        with pytest.raises(OptionError, match="`model` must be given"):
            load_checkpoint(path)
    else:
        keras.models.load_model(path)
    content = path.read_bytes()
    for at in np.random.default_rng(0).integers(100, len(content) - 100, 5):
        damaged = bytearray(content)
        damaged[at] ^= 4
        path.write_bytes(damaged)
        if weights_only or _in_an_entry(path, int(at)):
            with pytest.raises(CheckpointError, match="The checkpoint is damaged"):
                load(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="0 bytes"):
        load(path)
    os.remove(path)
    with pytest.raises(CheckpointError, match="The checkpoint must exist"):
        load(path)


def _in_an_entry(path: pathlib.Path, at: int) -> bool:
    """Returns whether a byte of a zip archive belongs to its entries, not to its directory."""
    import zipfile

    try:
        with zipfile.ZipFile(path) as file:
            found = [entry.header_offset + 30 + len(entry.filename) for entry in file.infolist()]
            sizes = [entry.compress_size for entry in file.infolist()]
    except zipfile.BadZipFile:
        return True
    return any(begin <= at < begin + size for begin, size in zip(found, sizes))
