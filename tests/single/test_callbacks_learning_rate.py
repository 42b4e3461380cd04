"""`LearningRateWarmup` and `LearningRateScale` in one process, against rates and momentum computed by hand."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from tfdistkit.callbacks import LearningRateScale, LearningRateWarmup
from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow

STEPS = 7
RATE = 0.05
Callbacks = Callable[[], list[keras.callbacks.Callback]]


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(8 * STEPS, 4)).astype("float32")
    return x, x[:, :1] * 2


def compiled(optimizer: Any, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    return model


def fit(model: keras.Model, callbacks: list[keras.callbacks.Callback], epochs: int = 3, **options: Any) -> Any:
    x, y = data()
    return model.fit(x, y, batch_size=8, shuffle=False, epochs=epochs, callbacks=callbacks, verbose=0, **options)


def weights(model: keras.Model) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(v) for v in [*model.weights, *model.optimizer.variables]]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


class Seen(keras.callbacks.Callback):
    """Records the rate of each step. Comes after the callbacks that set it."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def horovod_warmup(size: float, warmup_epochs: int, epochs: int) -> list[float]:
    """Returns the rates of Horovod's warm-up, by its formula."""
    rates = []
    for step in range(epochs * STEPS):
        epoch = step / STEPS + 1 / STEPS
        rates.append(RATE * (1 / size * (epoch * (size - 1) / warmup_epochs + 1)) if epoch < warmup_epochs else RATE)
    return rates


@pytest.mark.parametrize(("scale", "factor"), [(lambda n: 8 * n, 8.0), (lambda n: 2.5, 2.5), (lambda n: 0.5, 0.5)])
def test_warmup_is_horovods(scale: Callable[[int], float], factor: float) -> None:
    seen = Seen()
    history = fit(compiled(keras.optimizers.SGD(RATE)), [LearningRateWarmup(warmup_epochs=2, scale=scale), seen])
    np.testing.assert_allclose(seen.rates, horovod_warmup(factor, 2, 3), rtol=1e-6)
    np.testing.assert_allclose(history.history["learning_rate"], seen.rates[STEPS - 1 :: STEPS], rtol=0)


def test_warmup_by_steps() -> None:
    seen = Seen()
    fit(compiled(keras.optimizers.SGD(RATE)), [LearningRateWarmup(warmup_steps=10, scale=lambda n: 4), seen])
    expected = [RATE / 4 * (min(1.0, (step + 1) / 10) * 3 + 1) for step in range(3 * STEPS)]
    np.testing.assert_allclose(seen.rates, expected, rtol=1e-6)


def test_one_replica_needs_no_warmup() -> None:
    seen = Seen()
    fit(compiled(keras.optimizers.SGD(RATE)), [LearningRateWarmup(), seen], epochs=1)
    assert seen.rates == [np.float32(RATE)] * STEPS


def test_scales_make_a_schedule() -> None:
    seen = Seen()
    scales = [
        LearningRateScale(lambda epoch: 1 + epoch, end_epoch=2, staircase=False),
        LearningRateScale(0.1, start_epoch=2, end_epoch=3),
        LearningRateScale(lambda epoch: 0.5**epoch, start_epoch=3, end_epoch=4),
        LearningRateScale("sqrt", start_epoch=5),
    ]
    fit(compiled(keras.optimizers.SGD(RATE)), [*scales, seen], epochs=6)
    expected = [1 + step / STEPS for step in range(2 * STEPS)]
    expected += [0.1] * STEPS + [0.125] * STEPS * 2 + [1.0] * STEPS
    np.testing.assert_allclose(seen.rates, RATE * np.array(expected), rtol=1e-6)


@pytest.mark.parametrize(
    "multiplier", [lambda step: 1 / (1 + step), keras.optimizers.schedules.InverseTimeDecay(1.0, 1, 1.0)]
)
def test_scale_per_step(multiplier: Any) -> None:
    seen = Seen()
    fit(compiled(keras.optimizers.SGD(RATE)), [LearningRateScale(multiplier, per="step"), seen])
    np.testing.assert_allclose(seen.rates, [RATE / (1 + step) for step in range(3 * STEPS)], rtol=1e-6)


@pytest.mark.parametrize(("correction", "nesterov"), [(True, False), (True, True), (False, False)])
def test_momentum_correction(correction: bool, nesterov: bool) -> None:
    """Against steps by hand: v = m * v * new / old - new * g (Goyal et al., equation 10)."""
    x, y = data()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(RATE, momentum=0.9, nesterov=nesterov), "mse")
    seen = Seen()
    fit(model, [LearningRateWarmup(warmup_epochs=2, scale=lambda n: 4, momentum_correction=correction), seen])
    w, v, old = np.ones((4, 1)), np.zeros((4, 1)), seen.rates[0]
    for step, rate in enumerate(seen.rates):
        rows = slice(8 * (step % STEPS), 8 * (step % STEPS) + 8)
        gradient = 2 * x[rows].T @ (x[rows] @ w - y[rows]) / 8
        v = 0.9 * v * (rate / old if correction else 1.0) - rate * gradient
        w, old = w + (0.9 * v - rate * gradient if nesterov else v), rate
    np.testing.assert_allclose(model.get_weights()[0], w, rtol=1e-4)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(RATE, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(RATE),
    "rmsprop": lambda: keras.optimizers.RMSprop(RATE, momentum=0.5),
    "accumulation": lambda: keras.optimizers.SGD(RATE, momentum=0.9, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE, momentum=0.9)),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(RATE, 30), momentum=0.9),
}
# The optimizers that are tested with all schedules each time.
_FOR_ALL = ("sgd", "loss scale")
SCHEDULES: dict[str, Callbacks] = {
    "warm-up": lambda: [LearningRateWarmup(warmup_epochs=1.5, scale=lambda n: 4)],
    "steps": lambda: [
        LearningRateWarmup(warmup_steps=9, scale=lambda n: 4),
        LearningRateScale(0.1, start_epoch=2),
    ],
    "per step": lambda: [LearningRateScale(lambda step: 1 / (1 + step), per="step")],
}


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        pytest.param(one, schedule, marks=[pytest.mark.thorough] * (one not in _FOR_ALL and schedule != "warm-up"))
        for one in OPTIMIZERS
        for schedule in SCHEDULES
    ],
)
def test_every_step_has_its_rate_with_steps_per_execution(optimizer: str, schedule: str) -> None:
    one = compiled(OPTIMIZERS[optimizer]())
    several = compiled(OPTIMIZERS[optimizer](), steps_per_execution=3)  # 7 steps: the last execution is short.
    untouched = compiled(OPTIMIZERS[optimizer]())
    history = fit(one, SCHEDULES[schedule]()).history
    assert fit(several, SCHEDULES[schedule]()).history == history
    fit(untouched, [])
    assert_equal(weights(several), weights(one))
    assert not np.array_equal(weights(one)[0], weights(untouched)[0])


def test_run_eagerly_with_steps_per_execution() -> None:
    results = []
    for steps in (1, 3):
        model = compiled(OPTIMIZERS["sgd"](), steps_per_execution=steps, run_eagerly=True)
        fit(model, SCHEDULES["warm-up"]())
        results.append(weights(model))
    assert_equal(*results)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_model_is_restored_after_training(steps: int) -> None:
    """A second `fit` without callbacks keeps the last rate."""
    model = compiled(OPTIMIZERS["sgd"](), steps_per_execution=steps)
    fit(model, SCHEDULES["steps"](), epochs=3)
    before = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
    assert "train_step" not in vars(model)
    fit(model, [], epochs=1)
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == before == np.float32(RATE * 0.1)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_schedule_is_restored(steps: int) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(RATE, 30)
    model = compiled(keras.optimizers.SGD(schedule), steps_per_execution=steps)
    seen = Seen()
    fit(model, [LearningRateScale(0.5), seen], epochs=1)
    expected = [0.5 * float(schedule(step)) for step in range(1, STEPS + 1)]
    if steps == 1:
        np.testing.assert_allclose(seen.rates, expected, rtol=1e-6)
    assert vars(model.optimizer)["_learning_rate"] is schedule
    kernel = weights(model)[0]
    again = compiled(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(RATE / 2, 30)))
    fit(again, [], epochs=1)
    np.testing.assert_allclose(kernel, weights(again)[0], rtol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd", "schedule"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_model_saved_in_training_loads_without_tfdistkit(tmp_path: pathlib.Path, optimizer: str, steps: int) -> None:
    class Save(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.save(tmp_path / "model.keras")

    fit(compiled(OPTIMIZERS[optimizer](), steps_per_execution=steps), [*SCHEDULES["warm-up"](), Save()], epochs=1)
    code = f"""
import sys
sys.modules["tfdistkit"] = None
import keras
model = keras.models.load_model({str(tmp_path / "model.keras")!r})
assert int(model.optimizer.iterations) == {STEPS}, model.optimizer.iterations
assert type(model.optimizer.learning_rate).__module__.startswith(("keras", "tensorflow"))
print("rate", float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "rate" in result.stdout, result.stderr


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "schedule"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_restart_equals_an_uninterrupted_run(
    tmp_path: pathlib.Path, schedule: str, optimizer: str, steps: int
) -> None:
    def callbacks() -> list[keras.callbacks.Callback]:
        made = SCHEDULES[schedule]()
        for one in made:
            one.initial_learning_rate = None if optimizer == "schedule" else RATE
        return made

    whole = compiled(OPTIMIZERS[optimizer](), steps_per_execution=steps)
    fit(whole, callbacks(), epochs=4)
    first = compiled(OPTIMIZERS[optimizer](), steps_per_execution=steps)
    fit(first, callbacks(), epochs=1)
    first.save(tmp_path / "model.keras")
    second = keras.models.load_model(tmp_path / "model.keras")
    second.compile(second.optimizer, "mse", steps_per_execution=steps)
    fit(second, callbacks(), epochs=4, initial_epoch=1)
    assert_equal(weights(second), weights(whole))


def test_a_restart_requires_the_initial_rate(tmp_path: pathlib.Path) -> None:
    first = compiled(OPTIMIZERS["sgd"]())
    fit(first, SCHEDULES["warm-up"](), epochs=1)
    first.save(tmp_path / "model.keras")
    second = keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(UnsupportedError, match="initial_learning_rate"):
        fit(second, SCHEDULES["warm-up"](), initial_epoch=1)
    # In the same process the rate is known; after the warm-up it is not needed.
    fit(first, SCHEDULES["warm-up"](), initial_epoch=1)
    fit(second, SCHEDULES["warm-up"](), initial_epoch=2)


def test_a_fit_after_a_failed_fit_is_right() -> None:
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyError("broken")

    for steps in (1, 3):
        model = compiled(OPTIMIZERS["sgd"](), steps_per_execution=steps)
        start = weights(model)[: len(model.weights)]
        broken = LearningRateScale(0.25)
        with pytest.raises(KeyError):
            fit(model, [broken, Break()])
        model.set_weights(start)
        model.compile(OPTIMIZERS["sgd"](), "mse", steps_per_execution=steps)
        fit(model, [LearningRateScale(0.5), broken], epochs=2)
        expected = compiled(keras.optimizers.SGD(RATE / 4, momentum=0.9))
        fit(expected, [], epochs=2)
        assert_equal(weights(model)[: len(start)], weights(expected)[: len(start)])


def test_invalid_arguments_are_errors() -> None:
    x, y = data()
    with pytest.raises(UnsupportedError, match="steps_per_epoch"):
        compiled("sgd").fit(((x, y) for _ in range(3)), callbacks=[LearningRateWarmup(scale=lambda n: 2)], verbose=0)
    with pytest.raises(UnsupportedError, match="must have a number or a `LearningRateSchedule`"):
        fit(compiled(keras.optimizers.SGD(lambda: 0.1)), [LearningRateScale(0.5)])
    with pytest.raises(UnsupportedError, match="schedule"):
        fit(compiled(OPTIMIZERS["schedule"]()), [LearningRateScale(0.5, initial_learning_rate=0.1)])
    some = ({"warmup_epochs": 0}, {"scale": "cubic"}, {"initial_learning_rate": -1}, {"warmup_steps": "many"})
    for wrong in (*some, {"steps_per_epoch": 2.5}, {"steps_per_epoch": True}):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            LearningRateWarmup(**wrong)  # type: ignore[arg-type]
    for wrong in ({"multiplier": "cubic"}, {"multiplier": None}, {"multiplier": 1, "per": "batch"}):
        with pytest.raises(OptionError):
            LearningRateScale(**wrong)  # type: ignore[arg-type]


def test_prints_the_end_of_the_warmup(capsys: pytest.CaptureFixture[str]) -> None:
    fit(compiled(keras.optimizers.SGD(RATE)), [LearningRateWarmup(warmup_epochs=2, scale=lambda n: 4, verbose=1)])
    assert capsys.readouterr().out == "Epoch 2: finished gradual learning rate warmup to 0.05.\n"
