"""A backup resumes only the same training: changes of the script are errors, or accepted on purpose."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupted_runs import Data, arrays, assert_same, in_arrays, light, no_callbacks, refused, run

from tfdistkit.callbacks.backup.description import differences
from tfdistkit.callbacks.backup.plain_data import decode, encode
from tfdistkit.callbacks.backup.training_description import setup_of_data, setup_of_model

pytestmark = pytest.mark.tensorflow

layers, optimizers = keras.layers, keras.optimizers


def differences_of(now: Any, then: Any) -> str:
    """Returns the differences, after both descriptions went through a file."""
    kept: list[np.ndarray] = []
    return "; ".join(differences(now, decode(json.loads(json.dumps(encode(then, kept))), kept)))


def made(
    *, activations: tuple[str, str] = ("relu", "tanh"), names: tuple[Any, Any] = (None, None), **options: Any
) -> Any:
    model = keras.Sequential([
        keras.Input((4,)), *(layers.Dense(4, a, name=name) for a, name in zip(activations, names)), layers.Dense(1)
    ])  # fmt: skip
    model.compile(**{"optimizer": optimizers.SGD(0.1, momentum=0.9), "loss": "mse", "run_eagerly": True, **options})
    return model


def loss_with(factor: float) -> Callable[..., Any]:
    return lambda y, p: keras.ops.mean(factor * (y - p) ** 2)


# Maps a difference to the model before and after, and a part of the message.
MODELS: dict[str, tuple[Data, Data, str]] = {
    "optimizer": ({}, {"optimizer": optimizers.Lion}, "optimizer 0: 'Lion', in the backup 'SGD'"),
    "its momentum": ({}, {"optimizer": lambda: optimizers.SGD(0.1, momentum=0.5)}, "momentum: 0.5, in the backup 0.9"),
    "loss": ({}, {"loss": "mae"}, "loss: 'mae', in the backup 'mse'"),
    "lambda": ({"loss": lambda y, p: y - p}, {"loss": lambda y, p: p - y}, "loss, code"),
    "what a lambda takes": ({"loss": loss_with(1.0)}, {"loss": loss_with(2.0)}, "taken 0: 2.0, in the backup 1.0"),
    "argument of a loss": ({"loss": keras.losses.Huber(1.0)}, {"loss": keras.losses.Huber(2.0)}, "in the backup 1.0"),
    "metric": ({"metrics": ["mae"]}, {"metrics": ["mse"]}, "metrics 0: 'mse', in the backup 'mae'"),
    "activation": ({}, {"activations": ("relu", "relu")}, "activation: 'relu', in the backup 'tanh'"),
    "one more layer": ({}, {"activations": ("relu",) * 3, "names": (None,) * 3}, ", with Dense, in the backup"),
    "swapped layers": ({"names": ("a", "b")}, {"names": ("b", "a")}, "name: 'b', in the backup 'a'"),
}


def from_options(options: Data) -> Callable[[], Any]:
    def make() -> Any:
        make_optimizer = options.get("optimizer", lambda: optimizers.SGD(0.1, momentum=0.9))
        return made(**{**options, "optimizer": make_optimizer()})

    return make


@pytest.mark.parametrize("what", list(MODELS))
def test_differences_of_models_are_described(what: str) -> None:
    before, after, text = MODELS[what]
    then, now, same = (setup_of_model(from_options(options)()) for options in (before, after, before))
    assert text in differences_of(now, then) and not differences_of(same, then)


def test_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    before, after, text = MODELS["swapped layers"]
    assert run(from_options(before), in_arrays, no_callbacks, tmp_path, 2) is None
    message = refused(tmp_path, in_arrays, from_options(after))
    assert text in message and "accept_changes=True" in message, message
    found = run(from_options(before), in_arrays, no_callbacks, tmp_path)
    assert found is not None and found["batches"][0] == (0, 1)


def scaled(factor: float) -> Data:
    x, y = arrays()
    return {"x": x * factor, "y": y, "batch_size": 4}


def of_tensors(factor: float, batch_size: int = 4, buffer: int = 22) -> Data:
    x, y = arrays()
    return {"x": tf.data.Dataset.from_tensor_slices((x * factor, y)).shuffle(buffer, seed=1).batch(batch_size)}


class Sequence(keras.utils.PyDataset):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.features, self.labels = arrays()
        self.features = self.features * factor

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.features[index * 4 : index * 4 + 4], self.labels[index * 4 : index * 4 + 4]


OTHER_DATA: dict[str, tuple[Callable[[], Data], Callable[[], Data], str]] = {
    "arrays": (lambda: scaled(1.0), lambda: scaled(1.1), "the values differ"),
    "steps": (in_arrays, lambda: {**in_arrays(), "steps_per_epoch": 4}, "steps_per_epoch: 4, in the backup None"),
    "batch_size": (in_arrays, lambda: {**in_arrays(), "batch_size": 5}, "batch_size: 5, in the backup 4"),
    "class weights": (in_arrays, lambda: {**in_arrays(), "class_weight": {0: 1.0, 1: 2.0}}, "class_weight"),
    "shuffle": (in_arrays, lambda: {**in_arrays(), "shuffle": False}, "shuffle: False, in the backup True"),
    "shuffle of a PyDataset": (
        lambda: {"x": Sequence(1.0), "shuffle": False},
        lambda: {"x": Sequence(1.0)},
        "shuffle: True, in the backup False",
    ),
    "dataset": (lambda: of_tensors(1.0), lambda: of_tensors(1.1), "the values differ"),
    "its batches": (lambda: of_tensors(1.0), lambda: of_tensors(1.0, 5), "batch_size: 5, in the backup 4"),
    "its buffer": (
        lambda: of_tensors(1.0),
        lambda: of_tensors(1.0, buffer=9),
        "shuffle(buffer_size): 9, in the backup 22",
    ),
    "PyDataset": (lambda: {"x": Sequence(1.0)}, lambda: {"x": Sequence(1.1)}, "the values differ"),
}


@pytest.mark.parametrize("what", list(OTHER_DATA))
def test_differences_of_data_are_described(what: str) -> None:
    before, after, text = OTHER_DATA[what]
    then, now, same = (setup_of_data(make(), 1) for make in (before, after, before))
    assert text in differences_of(now, then) and not differences_of(same, then)


@pytest.mark.parametrize("what", ["arrays", "its batches", "shuffle"])
def test_other_data_is_refused(tmp_path: pathlib.Path, what: str) -> None:
    before, after, text = OTHER_DATA[what]
    assert run(light, before, no_callbacks, tmp_path, 3) is None
    assert text in refused(tmp_path, after)
    again = run(light, after, no_callbacks, tmp_path, accept_changes=True)
    assert again is not None and again["batches"][0] == (0, 0)  # The epoch begins anew.


def test_an_elastic_job_is_told_to_keep_its_global_batch_size(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after, text = OTHER_DATA["batch_size"]
    assert run(light, before, no_callbacks, tmp_path, 3) is None
    monkeypatch.setenv("TFDISTKIT_ELASTIC", "1:2")
    error = refused(tmp_path, after)
    assert text in error and "Give the global batch size, which does not change with the number of workers" in error


def test_accept_changes_accepts_them(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(made, in_arrays, no_callbacks, tmp_path, 4) is None
    changed = from_options({"optimizer": optimizers.Adam, "loss": "mae", "metrics": ["mae"]})
    found = run(changed, in_arrays, no_callbacks, tmp_path, accept_changes=True)
    assert found is not None and found["batches"][0] == (0, 3)
    assert "accepts these changes since the backup: optimizer 0: 'Adam', in the backup 'SGD'" in caplog.text
    assert int(found["values"][-2 * 6 - 2]) == 15  # Adam has begun by itself, after 3 of 18 steps.


def test_the_learning_rate_of_the_script_wins(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):
        get_state, set_state = dict, lambda self, state: None  # Or each run would begin with the list of the last one.

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            rates.append(round(float(self.model.optimizer.learning_rate), 6))

    def start(rate: float, break_at: int = 0, *more: Any) -> None:
        rates.clear()
        make = from_options({"optimizer": lambda: optimizers.SGD(rate, momentum=0.9)})
        run(make, in_arrays, lambda: [*more, Rates()], tmp_path, break_at)

    def halving() -> Any:
        return keras.callbacks.LearningRateScheduler(lambda epoch, now: now / 2 if epoch else now)

    start(0.1, 9, halving())
    assert rates[6:] == [0.05] * 3
    start(0.1, 3, halving())  # What training has changed is not what the script says.
    assert rates == [0.05] * 3 and "learning rate" not in caplog.text
    start(0.04, 3)
    assert rates == [0.04] * 3
    assert "learning rate of SGD from the script: 0.04. In the run of the backup the script had 0.1" in caplog.text
    start(0.04)
    assert set(rates) == {0.04}


def test_equal_setups_are_accepted(tmp_path: pathlib.Path) -> None:
    """Generated names, own classes, objects without a configuration, more epochs."""

    class Block(layers.Layer):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function, self.inner = function, [layers.Dense(4), layers.Dense(4)]

        def call(self, x: Any) -> Any:
            return self.function(self.inner[1](self.inner[0](x)))

    class Own(keras.Model):
        def __init__(self, thing: Any) -> None:
            super().__init__()
            self.thing, self.blocks = thing, [Block(lambda x: x * 2), keras.Sequential([layers.Dense(4)])]
            self.out = layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.out(self.blocks[1](self.blocks[0](x)))

    def make() -> Any:
        # Advances the generated names of layers; a seeded initializer would also change the other weights.
        [layers.Dense(1, kernel_initializer="zeros") for _ in range(int(np.random.default_rng().integers(1, 9)))]
        model = Own(object())
        schedule = optimizers.schedules.CosineDecay(0.001, 100)
        auc = keras.metrics.AUC()
        model.compile(
            optimizers.SGD(schedule), lambda y, p: keras.ops.mean((y - p) ** 2), metrics=[auc], run_eagerly=True
        )
        return model

    expected = run(make, in_arrays, no_callbacks, None)
    assert expected is not None and run(make, in_arrays, no_callbacks, tmp_path, 8) is None
    found = run(make, in_arrays, no_callbacks, tmp_path)
    assert found is not None
    assert_same(found, expected)
