"""Interrupted and resumed runs with `BackupAndResume`, compared with an uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tfdistkit.callbacks import BackupAndResume
from tfdistkit.errors import UnsupportedError

EPOCHS = 3

Data = dict[str, Any]


class Broken(Exception):
    """Raised in the middle of a training."""


class OfThisProcess(keras.callbacks.Callback):
    """A callback whose counters are not state of the training."""

    def get_state(self) -> None:
        return None

    def set_state(self, state: None) -> None:
        pass


class BreakAt(OfThisProcess):
    """Raises an error after a number of steps of this process."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps_left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps_left -= 1
        if not self.steps_left:
            raise Broken


class Batches(OfThisProcess):
    """Records epochs and batches, as other callbacks see them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []
        self.epoch = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((self.epoch, batch))


def compiled(**options: Any) -> keras.Model:
    """Returns a model with every kind of state."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.3, seed=5),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    optimizer = options.pop("optimizer", None) or keras.optimizers.Adam(0.05)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC()], **options)
    return model


def light() -> keras.Model:
    """Returns a model that needs no tracing."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=True)
    return model


def arrays(rows: int = 22) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32")


def in_arrays() -> Data:
    x, y = arrays()
    return {"x": x, "y": y, "batch_size": 4}


def no_callbacks() -> list[Any]:
    return []


def run(
    make_model: Callable[[], keras.Model],
    make_data: Callable[[], Data],
    make_callbacks: Callable[[], list[Any]],
    folder: Path | None,
    break_at: int = 0,
    seed: int | None = 7,
    **options: Any,
) -> dict[str, Any] | None:
    """Runs a training as a new process would; returns its results, or None if it was interrupted."""
    keras.backend.clear_session()
    if seed is not None:
        keras.utils.set_random_seed(seed)
    model, data, batches = make_model(), make_data(), Batches()
    callbacks = [batches, *([BreakAt(break_at)] if break_at else []), *make_callbacks()]
    if folder is not None:
        # First in the list: BackupAndResume must move itself to the end.
        callbacks.insert(0, BackupAndResume(folder, **{"save_freq": 1, **options}))
    try:
        history = model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    except Broken:
        return None
    metrics = {id(v) for v in model.metrics_variables}
    variables = [v for v in (*model.variables, *model.optimizer.variables) if id(v) not in metrics]
    values = [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
    return {"values": values, "history": history.history, "batches": batches.seen, "epochs": history.epoch}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares weights and optimizer bit for bit, and the history of all epochs."""
    for a, b in zip(found["values"], expected["values"], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found["epochs"] == expected["epochs"]
    assert found["history"] == expected["history"]


def refused(folder: Path, make_data: Callable[[], Data], make: Any = light, seed: int | None = 7) -> str:
    """Returns the error that a training raises before its first step."""
    with pytest.raises(UnsupportedError) as caught:
        run(make, make_data, no_callbacks, folder, seed=seed)
    return str(caught.value)
