"""Models with steps of their own, and what the check of their first step finds (see `step_check_losses`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdistkit
from tfdistkit.strategies.step_check import comparison

RNG = np.random.default_rng(3)
X = RNG.normal(size=(13, 6)).astype("float32")
Y = RNG.normal(size=(13, 2)).astype("float32")
IMAGES = RNG.random(size=(13, 8, 8, 1)).astype("float32")
WORDS = RNG.integers(1, 20, size=(13, 9))
WORDS[::2, 6:] = 0

Loss = Callable[[Any, Any, Any], Any]


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


@pytest.fixture(autouse=True)
def fresh_session() -> None:
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each check found: "equal", "different", or why it could not be made."""
    found: list[str] = []
    original = comparison.StepCheck._difference

    def noted(self: Any, elements: Any) -> Any:
        try:
            result = original(self, elements)
        except Exception as error:
            found.append(str(error))
            raise
        found.append("equal" if result is None else "different")
        return result

    monkeypatch.setattr(comparison.StepCheck, "_difference", noted)
    return found


def each(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p), axis=1)


class Own(keras.Model):
    """A model whose train step computes its loss with a function."""

    def __init__(self, loss: Loss, regularize: bool = True):
        super().__init__()
        self.hidden, self.out, self.own_loss = layers.Dense(8, "relu"), layers.Dense(2), loss
        self.between = [layers.BatchNormalization(), layers.Dropout(0.5), layers.GaussianNoise(0.1)] * regularize

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.hidden(x)
        for layer in self.between:
            x = layer(x, training=training)
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.own_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"own": ops.mean(loss)}


def compiled(strategy: Any, make: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
    with strategy.scope():
        model = make()
        model.compile(*(arguments or ("adam",)), **options)
    return model
