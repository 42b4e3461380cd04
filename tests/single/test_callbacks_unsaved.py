"""`BackupAndResume`: what cannot be resumed is refused or named."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pathlib
import queue
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupted_runs import arrays, assert_same, in_arrays, light, no_callbacks, run

from tfdistkit.callbacks import BackupAndResume
from tfdistkit.callbacks.backup.of_callbacks.random_numbers import draws_of
from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow

Pair = collections.namedtuple("Pair", "epoch loss")


@dataclasses.dataclass
class Record:
    epoch: int
    loss: float


def fit(folder: pathlib.Path, *callbacks: Any, model: Any = None, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    model, backup, (x, y) = model or light(), BackupAndResume(folder, **{"save_freq": 1, **options}), arrays()
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[*callbacks, backup])
    return model


def average() -> Any:
    mean = tf.train.ExponentialMovingAverage(0.9)
    mean.apply([TRACKED])
    return mean


TRACKED = tf.Variable(0.0)
# What a callback has at the begin, and what it does.
OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "iterator": (lambda: iter([1, 2, 3] * 9), lambda one, batch: next(one)),
    "count": (itertools.count, lambda one, batch: next(one)),
    "generator": (lambda: (batch for batch in range(99)), lambda one, batch: next(one)),
    "queue": (queue.Queue, lambda one, batch: one.put(batch)),
    "user_dict": (collections.UserDict, lambda one, batch: one.update({batch: 1})),
    "strings": (lambda: np.array([""] * 9, "U8"), lambda one, batch: one.put(batch, str(batch))),
    "average": (average, lambda one, batch: (TRACKED.assign_add(1.0), one.apply([TRACKED]))),
}
MADE: dict[str, Callable[[], Any]] = {
    "pair": lambda: Pair(1, 0.5),
    "record": lambda: Record(1, 0.5),
    "array": lambda: np.array([1, "a", None], object),
    "list": lambda: [Record(1, 0.5)],
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_that_change_are_named(tmp_path: pathlib.Path, caplog: Any, name: str) -> None:
    make, change = OBJECTS[name]

    class Own(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.kept = make()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            change(self.kept, batch)

    fit(tmp_path, Own())
    assert caplog.text.count("changes in `kept` of Own") == 1


@pytest.mark.parametrize("name", MADE)
def test_objects_that_are_made_in_training_are_named(tmp_path: pathlib.Path, caplog: Any, name: str) -> None:
    class Own(keras.callbacks.Callback):
        kept: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.kept = None

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.kept = self.kept or MADE[name]() if name != "array" else MADE[name]()

    fit(tmp_path, Own())
    assert caplog.text.count("changes in `kept` of Own") == 1


def test_objects_that_do_not_change_are_not_named(tmp_path: pathlib.Path, caplog: Any) -> None:
    """Also what changes, and is no state: files, clocks, locks."""

    class Own(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [make() for make, _ in OBJECTS.values()]
            self.made = [make() for make in MADE.values()]

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.path = pathlib.Path(str(batch))
            self.file = None if batch else (tmp_path / "file").open("w")

    fit(tmp_path, Own())
    assert not caplog.records


def noise(batch: int) -> float:
    return random.random() + batch


class Noise(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        return inputs + tf.random.normal(tf.shape(inputs)) + keras.random.normal((4,)) * 0


class Draws(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(1)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        np.random.normal()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        tf.random.uniform(())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        print(noise(batch), np.random.rand(), self.random.normal(), keras.random.uniform(()))


def test_random_numbers_that_a_resumed_run_draws_otherwise(tmp_path: pathlib.Path, caplog: Any) -> None:
    model = keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert draws_of(model, [Draws()]) == [
        "tf.random.normal in Noise.call",
        "np.random.rand in Draws.on_train_batch_end",
        "random.random in noise",
        "tf.random.uniform in Draws.on_epoch_end",
    ]
    fit(tmp_path, model=model)
    assert caplog.text.count("Received: tf.random.normal in Noise.call.") == 1
    assert draws_of(light(), [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: noise(batch))])


class Sampling(keras.layers.Layer):
    """As in a variational autoencoder."""

    def call(self, inputs: Any) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs))


@pytest.mark.parametrize("break_at", [4, 6, 9])
def test_random_numbers_without_a_seed(tmp_path: pathlib.Path, break_at: int) -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), Sampling(), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    expected = run(make, in_arrays, no_callbacks, None)
    assert run(make, in_arrays, no_callbacks, tmp_path, break_at) is None
    found = run(make, in_arrays, no_callbacks, tmp_path)
    assert found is not None and expected is not None
    assert_same(found, expected)


def test_flags_that_change_after_the_first_step(tmp_path: pathlib.Path, caplog: Any) -> None:
    class Freezes(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.layers[0].trainable = epoch < 2

    fit(tmp_path, Freezes())
    assert caplog.text.count("a change of `trainable`") == 1


class InLists(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="in_lists")
        self.seen: list[float] = []

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.seen += [float(one) for one in np.ravel(predicted)]

    def result(self) -> Any:
        return np.float32(np.mean(self.seen or [0]))

    def reset_state(self) -> None:
        self.seen = []


def test_metrics_with_python_state(tmp_path: pathlib.Path, caplog: Any) -> None:
    model = light()
    model.compile("sgd", "mse", metrics=[InLists()], run_eagerly=True)
    fit(tmp_path / "epochs", model=model, save_freq="epoch")
    assert not caplog.records
    fit(tmp_path / "steps", model=model)
    assert caplog.text.count("Python objects in in_lists that change") == 1


def test_compiling_within_fit_is_refused(tmp_path: pathlib.Path) -> None:
    class Compiles(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                self.model.compile("adam", "mse", run_eagerly=True)
                self.model.make_train_function(force=True)

    with pytest.raises(UnsupportedError, match="must not be compiled anew within a `fit`"):
        fit(tmp_path, Compiles())
    model = fit(tmp_path / "phases")
    model.compile("adam", "mse", run_eagerly=True)
    fit(tmp_path / "phases", model=model)


def test_keras_own_backup_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match="Remove keras.callbacks.BackupAndRestore"):
        fit(tmp_path / "ours", keras.callbacks.BackupAndRestore(tmp_path / "keras"))
