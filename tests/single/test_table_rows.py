"""A lookup under a tfdistkit strategy reads only rows; other reads are Keras's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistkit

pytestmark = pytest.mark.tensorflow

IDS = [[0, 3, 10], [5, 5, -1]]


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("one_device")


class Table(keras.layers.Layer):
    """A user's layer with a table, which mixed precision casts."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(11, 4), initializer="normal")

    def call(self, ids: Any) -> Any:
        return keras.ops.take(self.table, ids, axis=0)


def traced(strategy: Any, layer: Any, ids: Any) -> tuple[Any, Any, list[str]]:
    """Looks up in a tf.function; returns the result, its gradient, and the operations."""
    variable = layer.trainable_weights[0].value

    @tf.function
    def look_up() -> Any:
        def step() -> Any:
            with tf.GradientTape() as tape:
                rows = layer(ids)
                flat = rows.flat_values if isinstance(rows, tf.RaggedTensor) else rows
                loss = tf.reduce_sum(tf.cast(flat, tf.float32) ** 2)
            return rows, tf.convert_to_tensor(tape.gradient(loss, variable))

        return strategy.run(step)

    rows, gradient = look_up()
    return rows, gradient, [op.type for op in look_up.get_concrete_function().graph.get_operations()]


def check(strategy: Any, make: Callable[[], Any], ids: Any, by_rows: bool = True) -> list[str]:
    """Compares a layer under a tfdistkit strategy and without one; returns the operations under the strategy."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layer = make()
    default = tf.distribute.get_strategy()
    expected, expected_gradient, theirs = traced(default, layer, ids)
    rows, gradient, ours = traced(strategy, layer, ids)
    assert rows.dtype == expected.dtype
    compared = [r.to_tensor() if isinstance(r, tf.RaggedTensor) else r for r in (rows, expected)]
    np.testing.assert_array_equal(*compared)
    np.testing.assert_array_equal(gradient, expected_gradient)
    assert "ResourceGather" not in theirs and ("ResourceGather" in ours) == by_rows
    assert not by_rows or "ReadVariableOp" not in ours
    return ours


def built(layer: Any) -> Any:
    layer.build((None,))
    return layer


@pytest.mark.parametrize("ids", [IDS, 4, []], ids=str)
def test_dense_ids(strategy: Any, ids: Any) -> None:
    check(strategy, lambda: built(keras.layers.Embedding(11, 4)), tf.constant(ids, tf.int32))


def test_ragged_ids(strategy: Any) -> None:
    check(strategy, lambda: built(keras.layers.Embedding(11, 4)), tf.ragged.constant([[1, 2], [], [-1]]))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_casts_rows(strategy: Any, policy: str) -> None:
    ids = tf.constant(IDS)
    operations = check(strategy, lambda: built(Table(dtype=policy)), ids)
    assert operations.index("ResourceGather") < operations.index("Cast")
    check(strategy, lambda: built(keras.layers.Embedding(11, 4, dtype=policy)), ids)


def test_a_table_that_is_also_the_output(strategy: Any) -> None:
    class Tied(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = built(keras.layers.Embedding(11, 4))

        def call(self, ids: Any) -> Any:
            return keras.ops.matmul(self.table(ids), keras.ops.transpose(self.table.embeddings))

    with strategy.scope():
        layer = built(Tied())
    results = [traced(s, layer, tf.constant(IDS)) for s in (tf.distribute.get_strategy(), strategy)]
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)
    assert "ResourceGather" in results[1][2]


def test_lora_and_int8_stay_as_in_keras(strategy: Any) -> None:
    check(strategy, lambda: built(keras.layers.Embedding(11, 4, lora_rank=2)), tf.constant(IDS), by_rows=False)
    with strategy.scope():
        layer = built(keras.layers.Embedding(11, 4))
        layer.quantize("int8")
    expected = layer(tf.constant(IDS))
    np.testing.assert_array_equal(strategy.run(lambda: layer(tf.constant(IDS))), expected)


def test_values_of_a_stateless_scope_are_taken(strategy: Any) -> None:
    with strategy.scope():
        layer = built(keras.layers.Embedding(11, 4))
        table = np.arange(44.0, dtype="float32").reshape(11, 4)
        with keras.StatelessScope([(layer.embeddings, table)]):
            np.testing.assert_array_equal(layer(tf.constant([2])), table[2:3])
        np.testing.assert_array_equal(layer(tf.constant([2])), layer.embeddings.numpy()[2:3])


def test_other_reads_stay_as_in_keras(strategy: Any) -> None:
    table = keras.Variable(np.arange(6.0).reshape(2, 3))
    with strategy.scope():
        assert keras.ops.take(table, [1, 4]).numpy().tolist() == [1.0, 4.0]
        assert keras.ops.take(table, [2], axis=1).numpy().tolist() == [[2.0], [5.0]]
        assert keras.ops.take(np.eye(2), [1], axis=0).numpy().tolist() == [[0.0, 1.0]]
        assert keras.ops.take(keras.Variable([3, 4], dtype="int32"), [1], axis=0).numpy().tolist() == [4]


@pytest.mark.parametrize("epsilon", [1e-7, 0.0])
def test_adagrad_of_rows_is_adagrad(strategy: Any, epsilon: float) -> None:
    tables = []
    for scope in (tf.distribute.get_strategy(), strategy):
        with scope.scope():
            variable = keras.Variable(np.linspace(-1, 1, 44, dtype="float32").reshape(11, 4))
            optimizer = keras.optimizers.Adagrad(0.1, epsilon=epsilon)
            optimizer.build([variable])
        for factor in (1.0, 0.3):
            values = factor * np.linspace(0.5, -2, 12, dtype="float32").reshape(3, 4)
            gradient = tf.IndexedSlices(tf.constant(values), tf.constant([3, 7, 3]), tf.constant([11, 4]))
            scope.run(optimizer.apply, args=([gradient], [variable]))
        tables.append((variable.numpy(), optimizer.variables[-1].numpy()))
    np.testing.assert_array_equal(tables[0][0], tables[1][0])
    np.testing.assert_array_equal(tables[0][1], tables[1][1])
