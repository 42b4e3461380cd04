"""`BackupAndResume` in one process: every kind of data and of state."""

from __future__ import annotations

import collections
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupted_runs import Broken, Data, arrays, assert_same, compiled, in_arrays, light, no_callbacks, refused, run

from tfdistkit.callbacks import BackupAndResume, LearningRateScale
from tfdistkit.data import from_arrays
from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow


class Shuffled(keras.utils.PyDataset):
    """Shuffles itself after each epoch, by its own generator or by NumPy's."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.x, self.y = arrays()
        self.order = np.arange(len(self.x))
        self.generator: Any = np.random.default_rng(3) if own else np.random
        self.generator.shuffle(self.order)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = self.order[index * 4 : index * 4 + 4]
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        self.generator.shuffle(self.order)


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays())


def of_part(x: tf.Tensor, y: tf.Tensor) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, y))


def generator() -> Iterator[Any]:
    x, y = arrays()
    random = np.random.default_rng(1)
    for _ in itertools.count():
        rows = random.integers(0, len(x), 4)
        yield x[rows], y[rows]


PART = {"validation_steps": 2}
DATA: dict[str, Callable[[], Data]] = {
    "arrays": in_arrays,
    "arrays_in_order": lambda: {**in_arrays(), "shuffle": False},
    "arrays_with_validation": lambda: {**in_arrays(), "validation_split": 0.3},
    "validated_on_a_part": lambda: {**in_arrays(), "validation_data": dataset().shuffle(22).batch(4), **PART},
    "shuffled": lambda: {"x": dataset().shuffle(22).batch(4)},
    "shuffled_with_a_seed": lambda: {"x": dataset().shuffle(22, seed=1).batch(4).prefetch(1)},
    "shuffled_twice": lambda: {"x": dataset().shuffle(22).map(lambda x, y: (x, y)).shuffle(4).batch(4).shuffle(3)},
    "shuffled_parts": lambda: {"x": dataset().take(9).shuffle(9).concatenate(dataset().skip(9).shuffle(9)).batch(4)},
    "shuffled_files": lambda: {
        "x": dataset().batch(5).shuffle(5).interleave(of_part, 2).shuffle(6).batch(4).prefetch(1)
    },
    "dealt": lambda: {"x": from_arrays(arrays(), shuffle=True).batch(4)},
    "dealt_with_a_seed": lambda: {"x": from_arrays(arrays(), shuffle=True, seed=1).batch(4)},
    "of_unknown_length": lambda: {"x": dataset().shuffle(22).filter(lambda x, y: x[0] > -1).batch(4)},
    "repeated": lambda: {"x": dataset().shuffle(22).repeat().batch(4), "steps_per_epoch": 6},
    "longer_than_an_epoch": lambda: {"x": dataset().shuffle(22).repeat(3).batch(4), "steps_per_epoch": 5},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 6},
    "py_dataset": lambda: {"x": Shuffled(own=True)},
    "py_dataset_by_numpy": lambda: {"x": Shuffled(own=False), "shuffle": False},
}


# Their relatives are tested each time.
_THOROUGH = (
    *("arrays_in_order", "shuffled_with_a_seed", "dealt_with_a_seed", "longer_than_an_epoch", "generator"),
    *("of_unknown_length", "py_dataset_by_numpy", "decaying", "own_step_after_the_last"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in _THOROUGH)) for name in DATA]
)
def test_data_resumes_at_its_position(tmp_path: pathlib.Path, name: str) -> None:
    expected = run(light, DATA[name], no_callbacks, None)
    assert expected is not None
    steps = expected["batches"]
    # In the first epoch, in the middle of the second, and after its last step.
    ends = [i for i, (a, b) in enumerate(itertools.pairwise(steps), 1) if a[0] != b[0]]
    done = 0
    for broken_at in (2, ends[0] + 3, ends[1]):
        assert run(light, DATA[name], no_callbacks, tmp_path / "backup", broken_at - done) is None
        done = broken_at - 1  # the step that broke off had no backup
    found = run(light, DATA[name], no_callbacks, tmp_path / "backup")
    assert found is not None
    assert found["batches"] == steps[done:]
    assert_same(found, expected)
    assert not (tmp_path / "backup").exists()


def test_unseeded_arrays_resume_in_their_order(tmp_path: pathlib.Path) -> None:
    """The order is new in each epoch, as in Keras, but repeatable: no row is seen twice."""
    seen: list[np.ndarray] = []

    class Rows(keras.Model):
        def train_step(self, data: Any) -> Any:
            tf.py_function(lambda x: seen.append(x.numpy()), [data[0][:, 0]], [])
            return super().train_step(data)

    def make() -> keras.Model:
        inputs = keras.Input((4,))
        model = Rows(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    tf.random.set_seed(None)
    assert run(make, in_arrays, no_callbacks, tmp_path, 9, seed=None) is None
    del seen[-1]  # The step that broke off had no backup.
    assert run(make, in_arrays, no_callbacks, tmp_path, seed=None) is not None
    epochs = [np.concatenate(seen[first : first + 6]) for first in (0, 6, 12)]
    for rows in epochs:
        np.testing.assert_array_equal(np.sort(rows), np.sort(arrays()[0][:, 0]))
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[1], epochs[2])


class OwnStep(keras.Model):
    """Logs values that are not metrics, and has its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.own = keras.optimizers.SGD(0.1, momentum=0.9)
        self.dense.build((None, 4))
        self.own.build(self.dense.trainable_variables)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.own.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"own": loss}


def own_step() -> keras.Model:
    model = OwnStep()
    model.compile("sgd")
    return model


class Counting(keras.Model):
    """Counts its steps in a TensorFlow variable, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.steps = keras.layers.Dense(1), tf.Variable(0.0, trainable=False)

    def call(self, x: Any) -> Any:
        return self.dense(x) * (1 + self.steps / 100)

    def train_step(self, data: Any) -> Any:
        self.steps.assign_add(1.0)
        return super().train_step(data)


def counting() -> keras.Model:
    model = Counting()
    model.compile("sgd", "mse")
    return model


def accumulating() -> keras.Model:
    return compiled(optimizer=keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=3, use_ema=True))


def scaled() -> keras.Model:
    return compiled(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Nadam(0.05)))


def decaying() -> keras.Model:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
    return compiled(optimizer=keras.optimizers.Adam(schedule))


def three_at_once() -> keras.Model:
    return compiled(steps_per_execution=3)


MODELS = {
    "accumulating": (accumulating, 8),
    "scaled": (scaled, 8),
    "decaying": (decaying, 8),
    "own_step": (own_step, 8),
    "own_step_after_the_last": (own_step, 12),
    "three_at_once": (three_at_once, 4),
    "with_everything": (compiled, 12),
    "counting": (counting, 8),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in _THOROUGH)) for name in MODELS]
)
def test_models_resume_with_their_state(tmp_path: pathlib.Path, name: str) -> None:
    make, break_at = MODELS[name]
    expected = run(make, in_arrays, no_callbacks, None)
    assert expected is not None
    assert run(make, in_arrays, no_callbacks, tmp_path, break_at) is None
    found = run(make, in_arrays, no_callbacks, tmp_path)
    assert found is not None
    assert_same(found, expected)


def test_an_unbuilt_optimizer_is_refused_at_once(tmp_path: pathlib.Path) -> None:
    def make() -> keras.Model:
        model = OwnStep()
        model.own = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile("sgd")
        return model

    message = refused(tmp_path, in_arrays, make)
    assert "must be built before `fit`" in message and "optimizer.build(variables)" in message


class Counter(keras.callbacks.Callback):
    """Has state in an attribute, and a `get_state`."""

    def __init__(self) -> None:
        super().__init__()
        self.batches, self.limit, self.total = 0, 100, [0.0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        self.total[0] += float(logs["loss"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["counted"] = self.batches + self.total[0] / self.limit


class Odd(keras.callbacks.Callback):
    """Has an attribute that is not plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: collections.deque[int] = collections.deque()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.kept.append(epoch)
        logs["kept"] = len(self.kept)

    def get_state(self) -> Any:
        return list(self.kept)

    def set_state(self, state: Any) -> None:
        self.kept = collections.deque(state)


def stateful_callbacks() -> list[Any]:
    return [
        Counter(),
        Odd(),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.2, cooldown=1),
        keras.callbacks.EarlyStopping("loss", patience=2, min_delta=0.3, restore_best_weights=True),
        LearningRateScale(lambda epoch: 1 / (1 + epoch), staircase=False),
    ]


@pytest.mark.parametrize("break_at", (8, 12, 13))
def test_callbacks_resume_with_their_state(tmp_path: pathlib.Path, break_at: int) -> None:
    expected = run(light, in_arrays, stateful_callbacks, None)
    assert expected is not None and {"counted", "kept", "learning_rate"} <= set(expected["history"])
    assert run(light, in_arrays, stateful_callbacks, tmp_path, break_at) is None
    found = run(light, in_arrays, stateful_callbacks, tmp_path)
    assert found is not None
    assert_same(found, expected)


def test_a_training_interrupted_twice(tmp_path: pathlib.Path) -> None:
    expected = run(light, DATA["shuffled"], stateful_callbacks, None)
    assert expected is not None
    for break_at in (5, 4, 3):
        assert run(light, DATA["shuffled"], stateful_callbacks, tmp_path, break_at, save_freq="2 steps") is None
    found = run(light, DATA["shuffled"], stateful_callbacks, tmp_path)
    assert found is not None
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("save_freq", "break_at", "first"),
    [
        ("epoch", 10, (1, 0)),
        ("2 epochs", 16, (2, 0)),
        ("2 epochs", 10, (0, 0)),
        (4, 11, (1, 2)),
        ("0.001 seconds", 9, (1, 2)),
    ],
)
def test_frequencies(tmp_path: pathlib.Path, save_freq: Any, break_at: int, first: tuple[int, int]) -> None:
    assert run(light, in_arrays, no_callbacks, tmp_path, break_at, save_freq=save_freq) is None
    found = run(light, in_arrays, no_callbacks, tmp_path, save_freq=save_freq)
    assert found is not None and found["batches"][0] == first


def test_the_backup_of_a_finished_training_can_stay(tmp_path: pathlib.Path) -> None:
    first = run(light, in_arrays, no_callbacks, tmp_path, delete_checkpoint=False)
    again = run(light, in_arrays, no_callbacks, tmp_path, delete_checkpoint=False)
    assert first is not None and again is not None
    assert again["batches"] == []
    assert_same(again, first)


def test_early_stopping_stays_stopped(tmp_path: pathlib.Path) -> None:
    def stopping() -> list[Any]:
        return [keras.callbacks.EarlyStopping("loss", patience=1, min_delta=9, restore_best_weights=True)]

    expected = run(light, in_arrays, stopping, tmp_path, delete_checkpoint=False)
    found = run(light, in_arrays, stopping, tmp_path)
    assert expected is not None and found is not None
    assert expected["epochs"] == [0, 1] and found["batches"] == []
    assert_same(found, expected)


def test_an_unrepeatable_order_is_refused_before_training(tmp_path: pathlib.Path) -> None:
    keras.utils.set_random_seed(7)
    tf.random.set_seed(None)
    message = refused(tmp_path, DATA["shuffled"], seed=None)
    assert "a dataset with `shuffle` without a seed" in message and "keras.utils.set_random_seed(7)" in message
    assert "a dataset with `shuffle=True` without a seed" in refused(tmp_path, DATA["dealt"], seed=None)
    options = tf.data.Options()
    options.deterministic = False
    assert "deterministic" in refused(tmp_path, lambda: {"x": dataset().batch(4).with_options(options)})
    accepted = run(light, DATA["shuffled"], no_callbacks, tmp_path, seed=None, same_order=False)
    assert accepted is not None and len(accepted["batches"]) == 18


def test_data_or_models_that_differ_from_the_backup_are_refused(tmp_path: pathlib.Path) -> None:
    assert run(light, DATA["shuffled"], no_callbacks, tmp_path, 3) is None
    assert "shuffles by the seeds" in refused(tmp_path, DATA["shuffled_with_a_seed"])
    assert "shuffles by the seeds" in refused(tmp_path, DATA["shuffled"], seed=8)
    assert "shuffles by the seeds" in refused(tmp_path, DATA["dealt"])
    assert "batch_size: 5, in the backup 4" in refused(tmp_path, lambda: {"x": dataset().shuffle(22).batch(5)})
    message = refused(tmp_path, DATA["shuffled"], own_step)
    assert "must be the same as in the backup" in message, message
    assert "model: 2 items, with OwnStep, in the backup 3 items" in message, message
    found = run(light, DATA["shuffled"], no_callbacks, tmp_path)
    assert found is not None and found["batches"][0] == (0, 2)


def test_an_unrepeatable_order_of_a_py_dataset_is_refused(tmp_path: pathlib.Path) -> None:
    class Augmented(Shuffled):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + np.random.normal(size=x.shape).astype("float32"), y

    def data() -> Any:
        np.random.seed(1)  # Both begin with the same order, whatever ran before.
        return {"x": Augmented(own=False)}

    assert run(light, data, no_callbacks, tmp_path, 8) is None
    assert "on_epoch_end must be repeatable" in refused(tmp_path, data)


def test_a_folder_that_cannot_be_is_refused_before_training(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OptionError, match="must be a folder that the chief may write to"):
        run(light, in_arrays, no_callbacks, tmp_path / "file" / "folder")


@pytest.mark.parametrize("options", [{"save_freq": 0}, {"save_freq": "often"}, {"save_freq": True}, {"grace_s": -1},
                                     {"save_freq": "0 steps"}, {"save_freq": "1.5 epochs"}])  # fmt: skip
def test_invalid_options_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="Received: "):
        BackupAndResume("folder", **options)


def test_invalid_folder_or_position_is_an_error() -> None:
    with pytest.raises(OptionError, match="`backup_dir`"):
        BackupAndResume("gs://bucket/folder")
    model = light()
    with pytest.raises(UnsupportedError, match="at most one BackupAndResume"):
        model.fit(*arrays(), callbacks=[BackupAndResume("a"), BackupAndResume("b")])
    with pytest.raises(UnsupportedError, match="your own training loop"):
        keras.callbacks.CallbackList([BackupAndResume("a")], model=model).on_train_begin()
    assert issubclass(Broken, Exception)
