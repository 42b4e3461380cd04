"""Variables that replicas update alone: which ones, and no others (see `test_two_devices`)."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import tfdistkit

pytestmark = pytest.mark.tensorflow


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


@pytest.mark.parametrize("name", ("iteration", "counter"))
def test_a_variable_of_the_user_keeps_its_aggregation(strategy: Any, name: str) -> None:
    with strategy.scope():
        variable = tf.Variable(0, name=name, trainable=False, aggregation=tf.VariableAggregation.SUM)
    tf.function(lambda: strategy.run(lambda: variable.assign_add(tf.constant(1))))()
    assert int(variable.numpy()) == 2


@pytest.mark.parametrize("wrapped", (False, True), ids=("plain", "loss scale"))
def test_the_steps_of_an_optimizer_are_counted_once(strategy: Any, wrapped: bool) -> None:
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        if wrapped:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        weight = keras.Variable([1.0, 2.0])
        optimizer.build([weight])
    tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.constant([1.0, 1.0])], [weight])))()
    assert int(optimizer.iterations) == 1


class Longest(keras.layers.Layer):
    """Keeps the length of the longest sequence, in an integer."""

    def build(self, shape: Any) -> None:
        self.longest = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="longest")

    def call(self, inputs: Any) -> Any:
        lengths = keras.ops.sum(keras.ops.cast(inputs > 0.0, "int32"), axis=1)
        self.longest.assign(keras.ops.maximum(self.longest, keras.ops.max(lengths)))
        return inputs


def test_integers_that_are_no_sum_over_rows_are_refused(strategy: Any) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Longest(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(tfdistkit.errors.UnsupportedError, match="must be a sum over them"):
        model.fit(tf.ones((8, 4)), tf.ones((8, 1)), batch_size=4, verbose=0)


def test_sums_over_rows_add_up_in_a_loop(strategy: Any) -> None:
    with strategy.scope():
        layer = keras.layers.Layer()
        count = layer.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)
        total = layer.add_weight(shape=(2,), initializer="zeros", trainable=False)

    def step(x: Any) -> None:
        count.assign_add(tf.reduce_sum(tf.cast(x[:, 0] > 0.0, tf.int32)))
        total.assign_add(tf.reduce_sum(x, axis=0))

    data = tf.data.Dataset.from_tensor_slices(tf.ones((7, 2))).batch(4)
    run = tf.function(lambda x: strategy.run(step, args=(x,)))
    for batch in strategy.experimental_distribute_dataset(data):
        run(batch)
    assert int(count.numpy()) == 7
    assert total.numpy().tolist() == [7.0, 7.0]
