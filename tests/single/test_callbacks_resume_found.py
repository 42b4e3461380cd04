"""`BackupAndResume`: state that Keras does not list, signals of the user's own, other processes."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupted_runs import arrays, assert_same, in_arrays, light, no_callbacks, run

from tfdistkit.callbacks import BackupAndResume
from tfdistkit.callbacks.backup import backup_folder
from tfdistkit.callbacks.backup.found_objects import found_in
from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets the `fit`s that have ended, as a new process does."""
    forget = lambda: monkeypatch.setattr(backup_folder, "_ended", {})  # noqa: E731
    forget()
    return forget


class Own(keras.Model):
    """A model with a step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 4))

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def gradients(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        return tape.gradient(loss, self.trainable_variables), loss

    def optimizers(self, *kinds: Any) -> list[Any]:
        made = [kind(0.1, momentum=0.9) for kind in kinds]
        for one in made:
            one.build(self.trainable_variables)
        return made


class Several(Own):
    """Has its optimizers in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.of_parts = dict(zip("ab", self.optimizers(keras.optimizers.SGD, keras.optimizers.SGD)))

    def train_step(self, data: Any) -> Any:
        for optimizer in self.of_parts.values():
            gradients, loss = self.gradients(data)
            optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


class Accumulating(Own):
    """Adds up gradients in a list of TensorFlow variables."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = tf.Variable(0, trainable=False)
        self._sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_variables]

    def train_step(self, data: Any) -> Any:
        gradients, loss = self.gradients(data)
        self.steps.assign_add(1)
        for total, one in zip(self._sums, gradients):
            total.assign_add(one)
        if self.steps % 3 == 0:
            self.optimizer.apply([tf.convert_to_tensor(one) for one in self._sums], self.trainable_variables)
            for total in self._sums:
                total.assign(tf.zeros_like(total))
        return {"own": loss}


class Helper:
    """An object of the user's that holds an optimizer."""

    def __init__(self, optimizer: Any):
        self.parts = {"optimizer": [optimizer]}


class Helped(Own):
    """Has its optimizer in an object of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(*self.optimizers(keras.optimizers.SGD))

    def train_step(self, data: Any) -> Any:
        gradients, loss = self.gradients(data)
        self.helper.parts["optimizer"][0].apply(gradients, self.trainable_variables)
        return {"own": loss}


class Parts(Own):
    """Trains with the optimizer of a model inside of it, as GANs do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        self.inner.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        self.inner.optimizer.build(self.inner.trainable_variables)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.inner(x) - y) ** 2)
        own = self.inner.trainable_variables
        self.inner.optimizer.apply(tape.gradient(loss, own), own)
        return {"own": loss}


class Weighted(keras.losses.Loss):
    """A loss with a weight that a callback changes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = keras.Variable(1.0, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.weight * keras.ops.mean((y_true - y_pred) ** 2, -1)


class Halve(keras.callbacks.Callback):
    def __init__(self, weight: Any):
        super().__init__()
        self._weight = weight

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._weight.assign(self._weight / 2)


_LOSS: dict[str, Any] = {}


def with_loss_object() -> keras.Model:
    _LOSS["object"] = Weighted()
    _LOSS["weight"] = _LOSS["object"].weight
    model = light()
    model.compile("sgd", _LOSS["object"], run_eagerly=True)
    return model


def with_closure() -> keras.Model:
    weight = _LOSS["weight"] = tf.Variable(1.0, trainable=False)

    def scaled(y_true: Any, y_pred: Any) -> Any:
        return weight * (y_true - y_pred) ** 2

    model = light()
    model.compile("sgd", lambda y_true, y_pred: scaled(y_true, y_pred), run_eagerly=True)
    return model


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(2, 4))
    cells = keras.layers.LSTM(3, stateful=True)(keras.layers.Reshape((4, 1))(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(cells))
    model.compile("sgd", "mse")
    return model


def compiled(kind: type[keras.Model]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = kind()
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
        model.optimizer.build(model.trainable_variables)
        return model

    return make


def halving() -> list[Any]:
    return [Halve(_LOSS["weight"])]


MODELS: dict[str, tuple[Callable[[], keras.Model], Callable[[], list[Any]]]] = {
    "optimizers_in_a_dict": (compiled(Several), no_callbacks),
    "variables_in_a_list": (compiled(Accumulating), no_callbacks),
    "an_object": (compiled(Helped), no_callbacks),
    "a_model_inside": (compiled(Parts), no_callbacks),
    "a_loss_object": (with_loss_object, halving),
    "a_closure": (with_closure, halving),
    "a_stateful_layer": (stateful, no_callbacks),
}


@pytest.mark.parametrize("name", MODELS)
def test_state_that_keras_does_not_list(tmp_path: pathlib.Path, name: str) -> None:
    make, callbacks = MODELS[name]
    data = in_arrays if name != "a_stateful_layer" else lambda: {**in_arrays(), "batch_size": 2}
    expected = run(make, data, callbacks, None)
    assert expected is not None
    assert run(make, data, callbacks, tmp_path, 8) is None
    found = run(make, data, callbacks, tmp_path)
    assert found is not None
    assert_same(found, expected)


def shuffling_generator() -> Iterator[Any]:
    x, y = arrays()
    while True:
        order = np.random.permutation(len(x))
        for i in range(0, 20, 4):
            yield x[order[i : i + 4]], y[order[i : i + 4]]


def test_a_generator_that_shuffles_by_the_global_generator(tmp_path: pathlib.Path) -> None:
    data = lambda: {"x": shuffling_generator(), "steps_per_epoch": 5}  # noqa: E731
    expected = run(light, data, no_callbacks, None)
    assert expected is not None and run(light, data, no_callbacks, tmp_path, 8) is None
    found = run(light, data, no_callbacks, tmp_path)
    assert found is not None
    assert_same(found, expected)


@pytest.mark.parametrize("deletes", (True, False))
def test_a_signal_handler_that_returns(tmp_path: pathlib.Path, deletes: bool) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))

    class End(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3 and not received:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        expected = run(light, in_arrays, no_callbacks, None)
        run(light, in_arrays, lambda: [End()], tmp_path, delete_checkpoint=deletes)
        assert received == [signal.SIGTERM]
        found = run(light, in_arrays, lambda: [End()], tmp_path, delete_checkpoint=deletes)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found is not None and expected is not None
    assert found["batches"][0] == (0, 4)
    assert_same(found, expected)


def test_forked_processes_keep_their_signals(tmp_path: pathlib.Path) -> None:
    exit_codes: list[int | None] = []

    class Fork(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            process.start()
            time.sleep(0.2)
            process.terminate()
            process.join(10)
            exit_codes.append(process.exitcode)
            process.kill()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            time.sleep(0.3)  # The deadline of a signal that this process did not get would end it.

    assert run(light, in_arrays, lambda: [Fork()], tmp_path, grace_s=0.1) is not None
    assert set(exit_codes) == {-signal.SIGTERM}


class Late(Own):
    """Makes a variable in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def train_step(self, data: Any) -> Any:
        gradients, loss = self.gradients(data)
        if not self.kept:
            self.kept.append(tf.Variable(0.0, trainable=False))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own": loss}


def test_a_variable_that_the_first_step_makes_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UnsupportedError, match="Variables must be created before `fit`"):
        run(compiled(Late), in_arrays, no_callbacks, tmp_path)


def test_what_is_found_is_looked_for_anew_after_a_training(tmp_path: pathlib.Path) -> None:
    model = compiled(Own)()
    model.train_step = lambda data: {"own": model.gradients(data)[1]}
    model.fit(**in_arrays(), verbose=0, callbacks=[backup := BackupAndResume(tmp_path)])
    assert backup is not None
    model.late = [tf.Variable(0.0, trainable=False)]
    assert any(one is model.late[0] for one in found_in(model))
