"""A model of words whose step changes its gradients, for the tests of two devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 9, (45, 3))
TARGETS = (RNG.normal(size=(45, 3, 1)) * np.where(np.arange(45) < 10, 0.02, 3.0)[:, None, None]).astype("float32")

Gradients = list[Any]
Change = Callable[[Gradients], Gradients]


def centred(gradient: Any) -> Any:
    return gradient - tf.reduce_mean(gradient, axis=0, keepdims=True)


CHANGES: dict[str, Change] = {
    "global norm": lambda gradients: tf.clip_by_global_norm(gradients, 1.0)[0],
    "global norm of dense ones": lambda gradients: tf.clip_by_global_norm([*map(tf.convert_to_tensor, gradients)], 1.0)[
        0
    ],
    "global norm, then dense": lambda gradients: [
        *map(tf.convert_to_tensor, tf.clip_by_global_norm(gradients, 1.0)[0])
    ],
    "global norm, then values, dense": lambda gradients: [
        tf.clip_by_value(tf.convert_to_tensor(one), -0.05, 0.05) for one in tf.clip_by_global_norm(gradients, 1.0)[0]
    ],
    "norms": lambda gradients: [tf.clip_by_norm(one, 0.3) for one in gradients],
    "values": lambda gradients: [tf.clip_by_value(one, -0.05, 0.05) for one in gradients],
    "skipped": lambda gradients: [
        tf.where(tf.linalg.global_norm(gradients) < 3.0, one, tf.zeros_like(one))
        for one in map(tf.convert_to_tensor, gradients)
    ],
    "centred": lambda gradients: [centred(tf.convert_to_tensor(one)) for one in gradients],
    "checked": lambda gradients: [tf.debugging.check_numerics(tf.convert_to_tensor(one), "") for one in gradients],
}


class Sequences(keras.Model):
    """A model of words whose step changes its gradients."""

    def __init__(self, change: Change, loss_of_each: bool = False):
        super().__init__()
        self.table, self.cells = keras.layers.Embedding(9, 4), keras.layers.GRU(4, return_sequences=True)
        self.dense, self.change, self.loss_of_each = keras.layers.Dense(1), change, loss_of_each

    def call(self, x: Any) -> Any:
        return self.dense(self.cells(self.table(x)))

    def gradients(self, x: Any, y: Any, loss_of: Callable[[Any], Any]) -> tuple[Gradients, Any]:
        with tf.GradientTape() as tape:
            loss = loss_of((self(x, training=True) - y) ** 2)
        return self.change(tape.gradient(loss, self.trainable_variables)), loss

    def train_step(self, data: Any) -> Any:
        x, y = data
        loss_of = (lambda e: tf.reduce_mean(e, axis=(1, 2))) if self.loss_of_each else tf.reduce_mean
        gradients, loss = self.gradients(x, y, loss_of)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": tf.reduce_mean(loss)}


def made(change: Change, **options: Any) -> Sequences:
    model = Sequences(change, **options)
    model(WORDS[:2])
    model.compile(keras.optimizers.SGD(0.1))
    return model
