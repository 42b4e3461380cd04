"""Reducers under two replicas of one process: what travels, is kept and is refused (see `test_two_devices`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistkit
from tfdistkit.communication import BF16, FP16, Adasum, Average, Reducer, Sum
from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(3).normal(size=(7, 4)).astype("float32")
Y = X[:, :2] * 3.0


class Feedback(Reducer):
    """Sends a part of each gradient, and keeps the rest; counts what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def build(self, variables: list[Any], make_state: Any) -> list[Any]:
        self.calls.append(f"build {len(variables)}")
        return [make_state(variable, "rest") for variable in variables]

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Any) -> list[Any]:
        self.calls.append(f"reduce {len(gradients)} {len(variables)} {len(state)} of {wire.replicas}")
        for gradient, rest in zip(gradients, state):
            rest.assign(rest + 0.25 * gradient)
        return wire.sum([0.75 * gradient for gradient in gradients])

    def after_apply(self, variables: list[Any], state: list[Any], wire: Any) -> None:
        self.calls.append(f"after {len(variables)} {len(state)}")
        for rest in state:
            rest.assign(2.0 * rest)


def compiled(reducer: Any, make_optimizer: Any = lambda: keras.optimizers.SGD(1.0)) -> keras.Model:
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    strategy = tfdistkit.strategy("mirrored", devices=2, reducer=reducer)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(make_optimizer(), "mse")
    return model


def update_of(reducer: Any) -> np.ndarray:
    """Returns how far one step with a learning rate of 1 moves the kernel: minus the gradient."""
    model = compiled(reducer)
    before = model.get_weights()[0]
    model.train_on_batch(X, Y)
    return before - model.get_weights()[0]


def parts() -> list[np.ndarray]:
    """Returns each replica's part of the gradient: rows 0 to 3, and 4 to 6."""
    kernel = compiled(None).get_weights()[0].astype("float64")
    residuals = X.astype("float64") @ kernel - Y
    return [X[rows].T @ residuals[rows] / len(X) for rows in (slice(0, 4), slice(4, 7))]


def rounded(dtype: Any) -> np.ndarray:
    sent = [tf.cast(tf.cast(part, tf.float32), dtype) for part in parts()]
    return tf.cast(sent[0] + sent[1], tf.float32).numpy()


def test_the_average_is_exact_and_the_default() -> None:
    np.testing.assert_allclose(update_of(None), sum(parts()), rtol=1e-5)
    np.testing.assert_array_equal(update_of(Average()), update_of(None))


@pytest.mark.parametrize(("reducer", "dtype"), [(FP16(), tf.float16), (BF16(), tf.bfloat16)], ids=("fp16", "bf16"))
def test_half_the_bytes(reducer: Reducer, dtype: Any) -> None:
    # A part may be rounded to the other side where float32 and float64 differ.
    np.testing.assert_allclose(update_of(reducer), rounded(dtype), rtol=2**-7)
    assert (update_of(reducer) != update_of(None)).any()


def test_sums_are_the_average_times_the_replicas() -> None:
    np.testing.assert_allclose(update_of(Sum()), 2.0 * sum(parts()), rtol=1e-5)
    np.testing.assert_allclose(update_of(Sum(FP16())), 2.0 * rounded(tf.float16), rtol=2**-8)


def test_state_is_made_kept_and_saved(tmp_path: Path) -> None:
    reducer = Feedback()
    model = compiled(reducer, lambda: keras.optimizers.Adam(0.1))
    model.fit(X, Y, batch_size=7, epochs=3, verbose=0)
    assert reducer.calls[0] == "build 2" and reducer.calls.count("build 2") == 1
    assert "reduce 2 2 2 of 2" in reducer.calls and "after 2 2" in reducer.calls
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    rests = [np.array(v) for v in model.optimizer.variables if "rest" in v.path]
    assert len(rests) == 2 and all(np.abs(rest).max() > 0 for rest in rests)
    other = compiled(Feedback(), lambda: keras.optimizers.Adam(0.1))
    with other.distribute_strategy.scope():
        other.optimizer.build(other.trainable_variables)
    other.load_weights(path)
    for rest, loaded in zip(rests, [v for v in other.optimizer.variables if "rest" in v.path], strict=True):
        np.testing.assert_array_equal(np.array(loaded), rest)


@pytest.mark.parametrize(
    "make_optimizer",
    (
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=2.0),
        lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, clipnorm=1.0),
    ),
    ids=("loss scale", "accumulation"),
)
def test_state_of_optimizers_that_do_more(make_optimizer: Any) -> None:
    reducer = Feedback()
    compiled(reducer, make_optimizer).fit(X, Y, batch_size=4, epochs=1, verbose=0)
    assert reducer.calls.count("build 2") == 1 and "after 2 2" in reducer.calls


class OwnStep(keras.Model):
    """Takes the gradients of the global batch itself."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x) - y))
        gradients = tfdistkit.global_gradients(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_gradients_alone_have_no_state() -> None:
    def train(reducer: Reducer) -> None:
        strategy = tfdistkit.strategy("mirrored", devices=2, reducer=reducer)
        with strategy.scope():
            inputs = keras.Input((4,))
            model = OwnStep(inputs, keras.layers.Dense(2)(inputs))
            model.compile(keras.optimizers.SGD(1.0))
        model.train_on_batch(X, Y)

    train(FP16())
    with pytest.raises(UnsupportedError, match="Feedback keeps state"):
        train(Feedback())


class Short(Feedback):
    def build(self, variables: list[Any], make_state: Any) -> list[Any]:
        return [None]


@pytest.mark.parametrize("name", ("mirrored", "central_storage"))
def test_optimizers_that_compress_what_processes_send(name: Any) -> None:
    for devices in (1, 2):
        with tfdistkit.strategy(name, devices=devices).scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile(tfdistkit.compression.OneBitAdam(0.1, freeze_after=1), "mse")
        if devices == 1:
            model.fit(X, Y, batch_size=4, verbose=0)
            continue
        with pytest.raises(UnsupportedError, match="needs replicas in processes of their own"):
            model.fit(X, Y, batch_size=4, verbose=0)


class Made(FP16):
    """A reducer that returns what its test says."""

    def __init__(self, made: Any):
        self.made = made

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Any) -> Any:
        return self.made(wire.sum(gradients))


@pytest.mark.parametrize(
    ("made", "received"),
    [
        (lambda sums: sums[:1], "1 gradients"),
        (lambda sums: None, "a NoneType"),
        (lambda sums: [None] * len(sums), "a NoneType for gradient 0"),
        (lambda sums: [tf.cast(one, tf.float16) for one in sums], "float16"),
        (lambda sums: [tf.transpose(one[None]) for one in sums], "for gradient 0, which is"),
    ],
)
def test_what_a_reducer_returns_is_checked(made: Any, received: str) -> None:
    with pytest.raises(UnsupportedError, match="Made.reduce must return the gradient of each variable") as error:
        update_of(Made(made))
    assert received in str(error.value)


def test_bad_reducers_are_refused() -> None:
    for wrong in ("fp16", FP16):
        with pytest.raises(OptionError, match="`reducer` must be a tfdistkit.communication.Reducer"):
            tfdistkit.strategy("mirrored", devices=2, reducer=wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="must return the state of each variable"):
        update_of(Short())
    with pytest.raises(UnsupportedError, match="Adasum needs Horovod over MPI"):
        update_of(Adasum())
    with pytest.raises(UnsupportedError, match="needs replicas in processes of their own"):
        tfdistkit.strategy("mirrored", devices=2, reducer=tfdistkit.compression.ByteGrad())
    with pytest.raises(OptionError, match="has no option `reducer`"):
        tfdistkit.strategy("one_device", reducer=FP16())  # type: ignore[call-overload]
