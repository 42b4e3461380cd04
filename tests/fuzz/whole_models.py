"""Models with a custom `train_step` that are not stacks of layers: Keras's examples. Inputs are `numbers`.

Noise comes with the data, so that it can be compared.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from fuzz.programs import Program


def _dense(width: int, inputs: int, outputs: int) -> keras.Model:
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(width, activation="tanh"), layers.Dense(outputs)])


def _features(data: Any) -> Any:
    return keras.utils.unpack_x_y_sample_weight(data)[0]


class Vae(keras.Model):
    """Keras's variational autoencoder: means over rows of sums over features, three trackers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _dense(4, 4, 4), _dense(4, 2, 4)
        names = ("total_loss", "reconstruction_loss", "kl_loss")
        self.trackers = [keras.metrics.Mean(name=name) for name in names]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    def call(self, inputs: Any) -> Any:
        return self.decoder(self.encoder(inputs)[:, :2])

    def _parts_of_loss(self, x: Any) -> tuple[Any, Any, Any]:
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        faked = self.decoder(mean + ops.exp(0.5 * log_variance) * ops.sin(7.0 * x[:, :2]))
        reconstruction = ops.mean(ops.sum(ops.square(x - faked), axis=1))
        kl = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        kl = ops.mean(ops.sum(kl, axis=1))
        return reconstruction + kl, reconstruction, kl

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            parts = self._parts_of_loss(_features(data))
        gradients = tape.gradient(parts[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return self._log(parts)

    def test_step(self, data: Any) -> Any:
        return self._log(self._parts_of_loss(_features(data)))

    def _log(self, parts: Any) -> Any:
        for tracker, loss in zip(self.trackers, parts):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class Wgan(keras.Model):
    """WGAN-GP: the gradient of a gradient, two optimizers, no `call()`, a loop of critic steps, no trackers."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = _dense(4, 2, 1), _dense(4, 2, 2)

    def compile(self, optimizer: Any, **options: Any) -> None:
        super().compile(**options)
        self.critic_optimizer = optimizer
        self.generator_optimizer = keras.optimizers.SGD(0.05)

    def _penalty(self, real: Any, faked: Any) -> Any:
        between = 0.5 * (real + faked)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between)
        norm = ops.sqrt(ops.sum(ops.square(tape.gradient(judged, between)), axis=1) + 1e-6)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, data: Any) -> Any:
        noise, real = ops.split(_features(data), 2, axis=1)
        for turn in range(2):
            with tf.GradientTape() as tape:
                faked = self.generator(noise * (1.0 + turn))
                critic_loss = ops.mean(self.critic(faked)) - ops.mean(self.critic(real))
                critic_loss += self._penalty(real, faked)
            weights = self.critic.trainable_weights
            self.critic_optimizer.apply(tape.gradient(critic_loss, weights), weights)
        with tf.GradientTape() as tape:
            generator_loss = -ops.mean(self.critic(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply(tape.gradient(generator_loss, weights), weights)
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


class Distiller(keras.Model):
    """A student learns from a frozen teacher; a Keras loss inside `train_step`, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = _dense(3, 4, 1), _dense(5, 4, 1)
        self.teacher.trainable = False
        self.compare = keras.losses.MeanSquaredError()
        self.tracker = keras.metrics.Mean(name="distillation")

    def call(self, inputs: Any) -> Any:
        return self.student(inputs)

    def train_step(self, data: Any) -> Any:
        x = _features(data)
        taught = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            predicted = self.student(x, training=True)
            loss = 0.5 * self.compare(taught, predicted) + 0.5 * ops.mean(ops.abs(predicted - taught))
        weights = self.student.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.tracker.update_state(loss)
        return {"distillation": self.tracker.result()}


MODELS: dict[str, type] = {"vae": Vae, "wgan": Wgan, "distiller": Distiller}
ACTS = {"vae": ("fit", "evaluate", "predict"), "wgan": ("fit",), "distiller": ("fit", "predict")}


def make_whole_model(program: Program) -> keras.Model:
    """Makes the model of a program whose step is one of `MODELS`."""
    return MODELS[program.step]()
