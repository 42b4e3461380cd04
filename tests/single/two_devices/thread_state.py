"""What Keras keeps for each thread: right in replicas that are threads, too (see `test_two_devices`)."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistkit

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(3).normal(size=(8, 4)).astype("float32")
EAGER = pytest.mark.parametrize("eager", (False, True), ids=("graph", "eager"))


@keras.saving.register_keras_serializable("tests")
class Lazy(keras.layers.Layer):
    """Makes a layer when it is built, which a custom loop does in a replica."""

    def build(self, shape: Any) -> None:
        self.inner = keras.layers.Dense(3)
        self.inner.build(shape)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


class Noise(keras.layers.Layer):
    """Draws random numbers without a seed of its own."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs + keras.random.normal(keras.ops.shape(inputs)) if training else inputs


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


@pytest.fixture(autouse=True)
def fresh_session() -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    yield
    keras.config.set_dtype_policy("float32")


def run(strategy: Any, eager: bool, function: Any) -> Any:
    """Runs a function in both replicas; returns the results of each."""
    replicas = lambda: strategy.run(function, args=(tf.constant(X),))  # noqa: E731
    return strategy.experimental_local_results(replicas() if eager else tf.function(replicas)())


@EAGER
def test_a_layer_made_in_a_replica_has_the_policy_and_its_name(strategy: Any, eager: bool) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3), Lazy()])
    run(strategy, eager, model)
    inner = model.layers[1].inner
    assert inner.compute_dtype == "bfloat16"
    assert inner.name == "dense_1"
    assert [v.path for v in model.weights][2:] == ["sequential/lazy/dense_1/kernel", "sequential/lazy/dense_1/bias"]


@EAGER
def test_random_numbers_without_a_seed_are_those_of_the_global_seed(strategy: Any, eager: bool) -> None:
    def fitted() -> Any:
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), Noise(), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=eager)
        return model.fit(X, X[:, :1], batch_size=4, epochs=2, verbose=0).history["loss"]

    assert fitted() == fitted()


@EAGER
def test_replicas_draw_other_random_numbers_in_every_step(strategy: Any, eager: bool) -> None:
    with strategy.scope():
        noise = Noise()
        noise(X, training=True)  # TensorFlow makes no variables in a function that it traces again.
    step = lambda: strategy.run(lambda: noise(tf.zeros((2, 3)), training=True))  # noqa: E731
    step = step if eager else tf.function(step)
    drawn = [tuple(np.ravel(one).tolist()) for _ in range(3) for one in strategy.experimental_local_results(step())]
    assert len(set(drawn)) == 6


def test_trainings_in_two_threads_are_refused(strategy: Any) -> None:
    models = []
    with strategy.scope():
        for _ in range(2):
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            models.append(model)
    refused: list[str] = []

    class Other(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            thread = threading.Thread(target=self.train)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
            # The same thread may evaluate within `fit`.
            models[1].evaluate(X, X[:, :1], verbose=0)

        def train(self) -> None:
            with pytest.raises(tfdistkit.errors.UnsupportedError, match="One thread at a time") as caught:
                models[1].fit(X, X[:, :1], verbose=0)
            refused.append(str(caught.value))

    models[0].fit(X, X[:, :1], verbose=0, callbacks=[Other()])
    assert len(refused) == 1
    models[1].fit(X, X[:, :1], verbose=0)  # Now none is in the way.
