"""Losses in own steps, on batches of which some replicas have one row or none (see `test_two_devices`)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfdistkit
from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(1).normal(size=(9, 6, 6, 2)).astype("float32")
Y = X.mean((1, 2, 3))[:, None] + np.arange(9.0, dtype="float32")[:, None]


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=3)


class Own(keras.Model):
    """Normalizes each row of its inputs in `call`, by a mean that a single row could be taken for a mean of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = keras.Sequential([layers.Conv2D(3, 3), layers.GlobalAveragePooling2D(), layers.Dense(1)])

    def call(self, inputs: Any) -> Any:
        return self.net(inputs - ops.mean(inputs, axis=(1, 2, 3), keepdims=True))

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Standardizing(Own):
    """Computes its targets with numbers of the batch, whose rows TensorFlow knows in `train_on_batch`."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            wanted = (y - ops.mean(y)) / (1.0 + ops.std(y))
            loss = ops.mean(ops.square(wanted - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("kind", [Own, Standardizing])
def test_losses_of_few_rows_are_those_of_one_process(strategy: Any, kind: type[keras.Model]) -> None:
    def found(strategy: Any) -> list[Any]:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = kind()
            model(X[:1])
            model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        numbers: list[Any] = []
        for rows in (4, 1):
            for _ in range(2):
                numbers.append(model.train_on_batch(X[:rows], Y[:rows], return_dict=True)["loss"])
            numbers += model.test_on_batch(X[:rows], Y[:rows])
            numbers += model.fit(X, Y, batch_size=rows, shuffle=False, verbose=0).history["loss"]
            for drop in (False, True) if rows > 1 else ():
                batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows, drop_remainder=drop)
                batches = strategy.experimental_distribute_dataset(batches)  # As the user's own loops need it.
                numbers += model.fit(batches, verbose=0).history["loss"]
        return [*map(float, numbers), *(np.asarray(one) for one in model.get_weights())]

    for one, other in zip(found(strategy), found(tf.distribute.get_strategy()), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_weights_beside_a_dataset_that_the_user_distributed_are_refused(strategy: Any) -> None:
    """Keras has no way to add them; under parameter_server it left them out without a word."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 6, 2)), layers.Flatten(), layers.Dense(1)])
        model.compile("sgd", "mse")
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(4))
    with pytest.raises(OptionError, match="must be in the elements of a dataset that you distribute"):
        model.fit(batches, class_weight={0: 1.0, 1: 2.0}, verbose=0)


class Pairs(Own):
    """Rows and their neighbours should be alike."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            first, second = self.net(x[0::2]), self.net(x[1::2])
            loss = ops.mean(ops.square(first - second)) + ops.mean(ops.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_pairs_of_neighbours_are_exact_or_an_error(strategy: Any) -> None:
    def fitted(strategy: Any, rows: int) -> list[Any]:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Pairs()
            model.compile(keras.optimizers.SGD(0.05))
        model.fit(X[:rows], Y[:rows], batch_size=rows, shuffle=False, epochs=2, verbose=0)
        return model.get_weights()

    for one, other in zip(fitted(strategy, 6), fitted(tf.distribute.get_strategy(), 6), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)
    cut = r"one of every 2 rows[\s\S]*Make all batches a multiple of 6"
    with pytest.raises(tf.errors.InvalidArgumentError, match=cut):
        fitted(strategy, 8)  # 3, 3 and 2.


def _loop(strategy: Any, model: Any, rows: int, more: Any = lambda x: 0.0) -> None:
    """As TensorFlow's tutorials write it, on one batch."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.05)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(tf.reduce_mean((model(x, training=True) - y) ** 2, -1)) + more(x)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    data = tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(rows)
    for batch in strategy.experimental_distribute_dataset(data):
        tf.function(lambda batch: strategy.run(step, args=batch))(batch)


def test_a_loop_whose_replica_without_rows_would_wait_for_others_is_refused(strategy: Any) -> None:
    # Of no rows Keras makes other sums: without the refusal the loop hangs.
    with strategy.scope():
        normalization = layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([layers.Conv2DTranspose(2, 2), layers.Flatten(), normalization, layers.Dense(1)])
        model.build((None, 6, 6, 2))
    _loop(strategy, model, 9)
    with pytest.raises(
        UnsupportedError, match=r"no rows of this batch on replica 1\.\nBatch with `drop_remainder=True`"
    ):
        _loop(strategy, model, 1)


def test_a_loop_whose_sums_depend_on_the_replica_is_refused(strategy: Any) -> None:
    def more(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", tf.reduce_mean(x)) if x.shape[0] == 2 else 0.0

    with strategy.scope():
        model = keras.Sequential([layers.Flatten(), layers.Dense(1)])
        model.build((None, 6, 6, 2))
    with pytest.raises(UnsupportedError, match=r"1 on replica 0, 2 on replica 2\.\nLet no code of the step depend"):
        _loop(strategy, model, 8, more)
