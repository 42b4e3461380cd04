"""The check of a first step: models, data and calls as users have them (see `test_two_devices`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _own_steps import IMAGES, WORDS, Own, X, Y, checks, compiled, each, fresh_session, strategy
from keras import layers, ops

import tfdistkit
from tfdistkit.errors import UnsupportedError

__all__ = ["checks", "fresh_session", "strategy"]  # The fixtures.

pytestmark = pytest.mark.tensorflow


def pairs(x: Any, y: Any, p: Any) -> Any:
    return ops.mean(ops.square(p[:, 0][:, None] - p[:, 0]))


class Encoder(keras.Model):
    """A variational autoencoder as keras.io shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance, self.decoder = layers.Dense(3), layers.Dense(3), layers.Dense(6)
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x: Any) -> Any:
        mean, variance = self.mean(x), self.variance(x)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean, variance, self.decoder(mean + ops.exp(0.5 * variance) * noise)

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            mean, variance, again = self(x)
            divergence = -0.5 * (1 + variance - ops.square(mean) - ops.exp(variance))
            loss = ops.mean(ops.sum(ops.square(again - x), 1)) + ops.mean(ops.sum(divergence, 1))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"sum": loss}


class Adversarial(keras.Model):
    """A GAN with a gradient penalty: no `call`, two optimizers, three updates."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten(), layers.Dropout(0.3)]
        self.critic = keras.Sequential([keras.Input((8, 8, 1)), *convolutions, layers.Dense(1)])
        self.generator = keras.Sequential([keras.Input((5,)), layers.Dense(64), layers.Reshape((8, 8, 1))])

    def compile(self, one: Any, other: Any) -> None:
        super().compile()
        self.one, self.other = one, other

    def train_step(self, real: Any) -> Any:
        rows = tf.shape(real)[0]
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(tf.random.normal((rows, 5)), training=True)
                between = real + tf.random.uniform((rows, 1, 1, 1)) * (fake - real)
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    found = self.critic(between, training=True)
                norm = tf.sqrt(tf.reduce_sum(inner.gradient(found, between) ** 2, (1, 2, 3)) + 1e-8)
                loss = tf.reduce_mean(self.critic(fake)) - tf.reduce_mean(self.critic(real))
                loss += 10.0 * tf.reduce_mean((norm - 1.0) ** 2)
            self.one.apply(tape.gradient(loss, self.critic.trainable_weights), self.critic.trainable_weights)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic(self.generator(tf.random.normal((rows, 5)))))
        self.other.apply(tape.gradient(loss, self.generator.trainable_weights), self.generator.trainable_weights)
        return {"generated": loss}


class Translator(keras.Model):
    """Embeddings, masks, a recurrent layer, a mean over valid tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = layers.Embedding(20, 8, mask_zero=True), layers.GRU(8, return_sequences=True)
        self.out = layers.Dense(20)

    def call(self, x: Any) -> Any:
        return self.out(self.recurrent(self.embedding(x)))

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        losses = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        valid = ops.cast(ops.not_equal(y, 0), losses.dtype)
        return ops.sum(losses * valid) / ops.sum(valid)


def adams() -> tuple[Any, Any]:
    return keras.optimizers.Adam(), keras.optimizers.Adam()


MODELS: dict[str, Any] = {
    "encoder": (Encoder, lambda: ("adam",), (X,)),
    "adversarial": (Adversarial, adams, (IMAGES,)),
    "translator": (Translator, lambda: ("adam",), (WORDS, WORDS)),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_as_users_write_them_pass(strategy: Any, checks: list[str], name: str) -> None:
    make, arguments, data = MODELS[name]
    with strategy.scope():
        model = make()
        model.compile(*arguments())
    dataset = tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0]).batch(5)
    model.fit(dataset, epochs=2, verbose=0)
    assert checks == ["equal"]


def test_a_fault_in_reading_the_graph_is_found(
    strategy: Any, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tfdistkit.strategies.sync.aggregates import global_numbers

    monkeypatch.setattr(global_numbers, "of_global_batch", lambda *_, **__: None)
    model = compiled(strategy, lambda: Own(lambda x, y, p: ops.sum(each(y, p))))
    with pytest.raises(UnsupportedError, match="must have the gradients of one process"):
        model.fit(X, Y, batch_size=7, verbose=0)
    assert checks == ["different"]


@pytest.mark.parametrize("execution", (1, 3))
def test_each_batch_trains_once(strategy: Any, checks: list[str], execution: int) -> None:
    def batches() -> Iterator[Any]:
        for first in range(0, 12, 3):
            yield X[first : first + 3], Y[first : first + 3]

    with strategy.scope():
        seen = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)

        def loss(x: Any, y: Any, p: Any) -> Any:
            return ops.mean(each(y, p))

        class Counting(Own):
            def train_step(self, data: Any) -> Any:
                seen.assign_add(ops.sum(data[0][:, 0]))
                return super().train_step(data)

        model = Counting(loss)
        model.compile("adam", steps_per_execution=execution)
    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 2)))
    model.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), verbose=0)
    assert checks == ["equal"]
    np.testing.assert_allclose(float(seen.numpy()), X[:12, 0].sum(), rtol=1e-4)


def test_a_batch_of_one_row_is_enough(strategy: Any, checks: list[str]) -> None:
    compiled(strategy, lambda: Own(lambda x, y, p: ops.sum(each(y, p)))).fit(X[:1], Y[:1], verbose=0)
    assert checks == ["equal"]


def test_train_on_batch_is_checked_once(strategy: Any, checks: list[str]) -> None:
    model = compiled(strategy, lambda: Own(lambda x, y, p: ops.mean(each(y, p))))
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert checks == ["equal"]
    with pytest.raises(UnsupportedError, match="must have the gradients of one process"):
        compiled(strategy, lambda: Own(pairs)).train_on_batch(X, Y)


def test_the_step_after_compile_is_checked_again(strategy: Any, checks: list[str]) -> None:
    model = compiled(strategy, lambda: Own(lambda x, y, p: ops.mean(each(y, p))))
    for _ in range(2):
        model.fit(X, Y, batch_size=7, verbose=0, epochs=2)
        model.fit(X, Y, batch_size=7, verbose=0)
        model.compile("adam")
    assert checks == ["equal", "equal"]


def test_models_of_keras_alone_are_not_checked(strategy: Any, checks: list[str]) -> None:
    def make() -> Any:
        return keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)])

    compiled(strategy, make, "adam", "mse", metrics=["mae"]).fit(X, Y, verbose=0)
    assert checks == []


@pytest.mark.parametrize("part", ("loss", "layer"))
def test_own_losses_and_layers_are_checked(strategy: Any, checks: list[str], part: str) -> None:
    def make() -> Any:
        inner = layers.Lambda(lambda x: x - ops.mean(x, axis=0)) if part == "layer" else layers.Dense(4)
        return keras.Sequential([keras.Input((6,)), inner, layers.Dense(2)])

    loss: Any = "mse" if part == "layer" else lambda y, p: each(y, p)
    model = compiled(strategy, make, "adam", loss)
    if part == "layer":  # It centres the rows of a replica by the mean of them alone.
        with pytest.raises(UnsupportedError, match="must have the gradients of one process"):
            model.fit(X, Y, batch_size=7, verbose=0)
    else:
        model.fit(X, Y, batch_size=7, verbose=0)
    assert checks == ["different" if part == "layer" else "equal"]


def test_a_step_that_cannot_be_tried_says_why_and_trains(
    strategy: Any, checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def loss(x: Any, y: Any, p: Any) -> Any:
        chosen = tf.random.categorical(tf.zeros((1, 2)), 1)  # Constants cannot stand for these numbers.
        return ops.mean(each(y, p)) * (1.0 + ops.cast(ops.sum(chosen), "float32"))

    with caplog.at_level(logging.INFO, "tfdistkit"):
        compiled(strategy, lambda: Own(loss)).fit(X, Y, batch_size=7, verbose=0)
    assert "is not compared with one process: it draws random numbers (Multinomial)" in caplog.text
    assert len(checks) == 1


def test_a_step_for_a_fixed_number_of_rows_is_not_tried(
    strategy: Any, checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = compiled(strategy, lambda: Own(lambda x, y, p: ops.mean(each(tf.ones((4, 2)), p))))
    with caplog.at_level(logging.INFO, "tfdistkit"):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert "is not compared with one process: it has a fixed number of rows" in caplog.text


@pytest.mark.parametrize("of_rows", (False, True))
def test_losses_of_unknown_rank_equal_one_process(strategy: Any, checks: list[str], of_rows: bool) -> None:
    def loss(x: Any, y: Any, p: Any) -> Any:
        factor = tf.py_function(lambda: 2.0, (), tf.float32)
        assert factor.shape.rank is None
        return each(y, p) * factor if of_rows else ops.mean(each(y, p)) * factor

    def trained(scope: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        with scope:
            model = Own(loss, regularize=False)
            model.compile(keras.optimizers.SGD(0.01))
        model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
        return model.get_weights()

    expected = trained(tf.distribute.get_strategy().scope())
    for one, other in zip(trained(strategy.scope()), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert checks == ["it calls Python (`tf.py_function`, `tf.numpy_function`)"]


def test_what_is_the_same_for_all_rows_is_so_in_the_comparison(strategy: Any, checks: list[str]) -> None:
    class Noisy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.layer(x)

        def train_step(self, data: Any) -> Any:
            noise = tf.random.stateless_uniform((3,), data["seed"])
            with tf.GradientTape() as tape:
                loss = ops.mean(each(data["y"], self(data["x"] * (1.0 + noise))))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"own": loss}

    rows = tf.data.Dataset.from_tensor_slices({"x": X[:10, :3], "y": Y[:10]}).batch(4)
    data = rows.enumerate().map(lambda number, batch: {**batch, "seed": tf.stack([number, 3])})

    def trained(scope: Any, data: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(5)
        with scope:
            model = Noisy()
            model.compile(keras.optimizers.SGD(0.1))
        model.fit(data, verbose=0)
        return model.get_weights()

    expected = trained(tf.distribute.get_strategy().scope(), data)
    found = trained(strategy.scope(), tfdistkit.data.same_for_all_rows(data, "seed"))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert checks == ["equal"]


def test_it_can_be_switched_off(checks: list[str]) -> None:
    strategy = tfdistkit.strategy("mirrored", devices=2, check_step=False)
    compiled(strategy, lambda: Own(pairs)).fit(X, Y, batch_size=7, verbose=0)
    assert checks == []


def test_it_must_be_a_bool() -> None:
    with pytest.raises(ValueError, match="`check_step` must be True or False"):
        tfdistkit.strategy("mirrored", devices=2, check_step="no")
