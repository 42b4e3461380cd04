"""`BackupAndResume`: models, optimizers and variables that only a callback has."""

from __future__ import annotations

import logging
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupted_runs import BreakAt, Broken, arrays, compiled, light

from tfdistkit.callbacks import BackupAndResume
from tfdistkit.callbacks.backup.of_callbacks.states import CallbackStates

pytestmark = pytest.mark.tensorflow


class Average(keras.callbacks.Callback):
    """A mean teacher."""

    def __init__(self, model: keras.Model):
        super().__init__()
        self.teacher = keras.models.clone_model(model)
        self.teacher.set_weights(model.get_weights())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for mean, now in zip(self.teacher.weights, self.model.weights):
            mean.assign(keras.ops.cast(0.9 * mean + 0.1 * keras.ops.cast(now, "float32"), mean.dtype))

    @property
    def variables(self) -> list[Any]:
        return list(self.teacher.variables)


class Shadow(keras.callbacks.Callback):
    """Keeps averages in a dict, made when training begins."""

    def on_train_begin(self, logs: Any = None) -> None:
        values = {one.path: one.value for one in self.model.trainable_variables}
        self.shadow = {path: tf.Variable(tf.cast(value, "bfloat16")) for path, value in values.items()}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for one in self.model.trainable_variables:
            self.shadow[one.path].assign_add(0.1 * tf.cast(one.value, "bfloat16"))

    @property
    def variables(self) -> list[Any]:
        return list(self.shadow.values())


def probe(model: keras.Model) -> Any:
    """Returns a callback that trains another model, of the script."""
    other, (x, y) = compiled(), arrays()

    class Probe(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            other.train_on_batch(x[:6], y[:6])

        @property
        def variables(self) -> list[Any]:
            return [*other.trainable_variables, *other.non_trainable_variables, *other.optimizer.variables]

    return Probe()


class Critic(keras.callbacks.Callback):
    """Trains a second model in a loop of its own; it is in an object, with its optimizer."""

    class Parts:
        def __init__(self) -> None:
            self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.Adam(0.1)

    def __init__(self, model: keras.Model):
        super().__init__()
        self.parts = self.Parts()
        self.parts.optimizer.build(self.parts.model.trainable_variables)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        x, y = arrays()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.parts.model(x) - y) ** 2)
        variables = self.parts.model.trainable_variables
        self.parts.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    @property
    def variables(self) -> list[Any]:
        return [*self.parts.model.variables, *self.parts.optimizer.variables]


def train(folder: pathlib.Path, make: Any, break_at: int = 0) -> list[np.ndarray]:
    """Trains 3 epochs of 6 steps; may end in one. Returns the variables of the callback."""
    keras.utils.set_random_seed(1)
    model, (x, y) = light(), arrays()
    own = make(model)
    callbacks = [own, BreakAt(break_at), BackupAndResume(folder, save_freq=1)]
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
    return [np.array(keras.ops.convert_to_numpy(one)) for one in own.variables]


@pytest.mark.parametrize("make", [Average, lambda model: Shadow(), probe, Critic])
def test_they_are_restored(tmp_path: pathlib.Path, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    expected = train(tmp_path / "undisturbed", make)
    with pytest.raises(Broken):
        train(tmp_path / "folder", make, 4)
    with pytest.raises(Broken):
        train(tmp_path / "folder", make, 6)
    with caplog.at_level(logging.WARNING):
        found = train(tmp_path / "folder", make)
    assert not caplog.records
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_other_variables_are_named(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Broken):
        train(tmp_path, Average, 4)

    class Wide(Average):
        def __init__(self, model: keras.Model):
            super().__init__(model)
            self.teacher = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    Wide.__name__ = "Average"
    train(tmp_path, Wide)
    assert "The backup has other variables" in caplog.text


def in_an_attribute() -> Any:
    class Late(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.late: dict[str, Any] = {}
            self.variables: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for one in self.model.trainable_variables:
                self.late.setdefault(one.path, tf.Variable(one.value)).assign_add(one.value)

    return Late()


def in_a_closure() -> Any:
    late = None

    class Late(keras.callbacks.Callback):
        variables: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal late
            if late is None:
                late = keras.models.clone_model(self.model)
            late.set_weights(self.model.get_weights())

    return Late()


def in_a_dict() -> Any:
    late: dict[int, Any] = {}

    class Late(keras.callbacks.Callback):
        variables: list[Any] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            late[batch] = tf.Variable(self.model.trainable_variables[0])

    return Late()


@pytest.mark.parametrize("make", [in_an_attribute, in_a_closure, in_a_dict])
def test_what_is_made_in_training_is_named(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, make: Any) -> None:
    train(tmp_path, lambda model: make())
    assert "late` of Late" in caplog.text and caplog.text.count("changes in") == 1


def test_the_trained_model_is_saved_once(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    class Reads(keras.callbacks.Callback):
        def __init__(self, model: keras.Model):
            super().__init__()
            self.layers, self.same = model.layers, keras.Sequential(model.layers)
            self.variables: list[Any] = []
            self.unused = keras.callbacks.EarlyStopping()  # It never gets a model.

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            print(self.same.get_weights(), self.model.optimizer.iterations)

    made: list[Any] = []
    train(tmp_path, lambda model: made.append(Reads(model)) or made[-1])
    assert not caplog.records
    states = CallbackStates([made[0]], made[0].model)
    made[0].model.layers[0].kernel.assign_add(np.ones((4, 1)))
    assert states.get() == {"Reads#0": {}, "Reads#0/EarlyStopping#0": {}}
