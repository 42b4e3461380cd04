"""The check of a first step: what a step writes to a variable and reads again (see `test_two_devices`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _own_steps import Own, X, Y, checks, compiled, each, fresh_session, strategy
from keras import layers, ops

import tfdistkit

__all__ = ["checks", "fresh_session", "strategy"]  # The fixtures.

pytestmark = pytest.mark.tensorflow


class Scaling(layers.Layer):
    """A layer that keeps a number for each column, and divides by it."""

    def __init__(self, kept: Callable[[Any, Any], Any], times: int = 1):
        super().__init__()
        self.kept, self.times = kept, times

    def build(self, shape: Any) -> None:
        self.state = self.add_weight(shape=(shape[-1],), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        for _ in range(self.times):
            self.state.assign(self.kept(self.state, x))
        return x / (1 + self.state) if self.times == 1 else x


class Running(Own):
    """A model that divides its loss by the running mean of this loss."""

    def __init__(self) -> None:
        super().__init__(lambda x, y, p: ops.mean(each(y, p)), regularize=False)
        self.mean = self.add_weight(shape=(), initializer="ones", trainable=False)
        self.plain, self.own_loss = self.own_loss, self.divided

    def divided(self, x: Any, y: Any, p: Any) -> Any:
        loss = self.plain(x, y, p)
        self.mean.assign(0.9 * self.mean + 0.1 * tf.stop_gradient(loss))
        return loss / self.mean


class SharpnessAware(Own):
    """A model that computes its gradients at weights that it moves, and moves back (SAM)."""

    def __init__(self, of_all: bool):
        super().__init__(lambda x, y, p: ops.mean(each(y, p)), regularize=False)
        self.of_all = of_all

    def gradients(self, x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = self.own_loss(x, y, self(x))
        found: list[Any] = tape.gradient(loss, self.trainable_variables)
        return found

    def train_step(self, data: Any) -> Any:
        x, y = data
        gradients = self.gradients(x, y)
        if self.of_all:
            gradients = tfdistkit.global_gradients(gradients)
        norm = tf.linalg.global_norm(gradients)
        for variable, gradient in zip(self.trainable_variables, gradients):
            variable.assign_add(0.5 * gradient / norm)
        moved = self.gradients(x, y)
        for variable, gradient in zip(self.trainable_variables, gradients):
            variable.assign_sub(0.5 * gradient / norm)
        self.optimizer.apply_gradients(zip(moved, self.trainable_variables))
        return {"norm": norm}


def scaled(kept: Callable[[Any, Any], Any], times: int = 1) -> Callable[[], Any]:
    return lambda: keras.Sequential([keras.Input((6,)), Scaling(kept, times), layers.Dense(2)])


def running_mean(state: Any, x: Any) -> Any:
    return 0.9 * state + 0.1 * ops.mean(x**2, axis=0)


MODELS: dict[str, Callable[[], Any]] = {
    "scale": scaled(running_mean),
    "loss": Running,
    "sharpness": lambda: SharpnessAware(of_all=False),
    "sharpness_of_all": lambda: SharpnessAware(of_all=True),
    "scale_by_sums": scaled(lambda state, x: state + ops.sum(x**2, axis=0)),
    "scale_by_all_rows": scaled(lambda state, x: running_mean(state, tfdistkit.collectives.all_gather(x))),
    "mean_of_means": scaled(running_mean, times=2),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_again(strategy: Any, checks: list[str], name: str) -> None:
    weights = []
    for one in (tf.distribute.get_strategy(), strategy):
        keras.utils.set_random_seed(5)
        model = compiled(one, MODELS[name], "sgd", "mse")
        model.fit(X, Y, batch_size=5, epochs=2, verbose=0, shuffle=False)
        weights.append(model.get_weights())
    assert checks == ["equal"]
    for plain, ours in zip(*weights):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
