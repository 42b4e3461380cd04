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
