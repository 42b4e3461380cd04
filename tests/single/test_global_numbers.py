"""Numbers that a step computes from its rows: for the global batch, from the sums and means of two replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow

_layers: dict[Any, Any] = {}

# Of which the mean of the replicas is exact: nothing is sent.
MEANS = {
    "mean": lambda tf, ops, x, w: ops.mean(x * w),
    "means and a penalty": lambda tf, ops, x, w: (
        0.5 * ops.mean(x * w) + ops.mean(ops.abs(x)) / 3 + 0.1 * ops.sum(w * w)
    ),
    "of each column": lambda tf, ops, x, w: ops.sum(ops.mean(x * w, axis=0) * tf.constant([1.0, 2.0, 3.0])),
    "by the rows": lambda tf, ops, x, w: ops.sum(x * w) / ops.cast(ops.shape(x)[0], "float32"),
    "by the entries": lambda tf, ops, x, w: ops.sum(x * w) / tf.cast(tf.size(x), "float32"),
    "divided before": lambda tf, ops, x, w: ops.sum(x * w / ops.cast(ops.shape(x)[0], "float32")),
    "joined": lambda tf, ops, x, w: ops.sum(ops.stack([ops.mean(x * w), ops.mean(x)])),
    "a penalty": lambda tf, ops, x, w: ops.sum(w * w),
    "in a branch": lambda tf, ops, x, w: tf.cond(w[0] > 100.0, lambda: ops.sum(x), lambda: ops.mean(x * w)),
}
OTHERS = {
    "sum": lambda tf, ops, x, w: ops.sum(x * w),
    "sum by a constant": lambda tf, ops, x, w: ops.sum(x * w) / 8.0,
    "sum and a penalty": lambda tf, ops, x, w: ops.sum(x * w) + 0.1 * ops.sum(w * w),
    "sum times a weight": lambda tf, ops, x, w: ops.sum(x) * w[0] * w[1],
    "sums of columns": lambda tf, ops, x, w: ops.sum(ops.square(ops.sum(x * w, axis=0))),
    "quotient": lambda tf, ops, x, w: ops.sum(x * w) / ops.sum(ops.abs(x)),
    "masked": lambda tf, ops, x, w: tf.math.divide_no_nan(ops.sum(x * w * _mask(ops, x)), ops.sum(_mask(ops, x))),
    "kept": lambda tf, ops, x, w: tf.reduce_mean(tf.boolean_mask(x[:, 0] * w[0], x[:, 1] > 0)),
    "kept and all": lambda tf, ops, x, w: 2 * tf.reduce_mean(tf.boolean_mask(x * w, x[:, 1] > 0)) + ops.mean(x),
    "count of kept": lambda tf, ops, x, w: (
        ops.sum(x * w) / ops.cast(ops.maximum(tf.math.count_nonzero(x > 0), 1), "float32")
    ),
    "l2_loss": lambda tf, ops, x, w: tf.nn.l2_loss(x * w),
    "stacked": lambda tf, ops, x, w: ops.sum(tf.stack([x[:, i] * w[i] for i in range(3)])),
    "transposed": lambda tf, ops, x, w: ops.sum(ops.square(ops.transpose(x * w))),
    "largest": lambda tf, ops, x, w: ops.max(x * w) - 2 * ops.sum(ops.min(x * w, axis=0)),
    "scaled by the largest": lambda tf, ops, x, w: ops.mean(x * w) / ops.max(ops.abs(x)),
    "root": lambda tf, ops, x, w: ops.sqrt(ops.mean(ops.square(x * w))),
    "logarithm": lambda tf, ops, x, w: ops.log(ops.mean(ops.exp(x * w))) - ops.mean(x),
    "norm": lambda tf, ops, x, w: ops.norm(ops.reshape(x * w, (-1,))),
    "product of means": lambda tf, ops, x, w: ops.sum(ops.mean(x * w, axis=0) * ops.mean(ops.abs(x), axis=0)),
    "correlation of columns": lambda tf, ops, x, w: ops.sum(ops.square(ops.matmul(ops.transpose(x), x * w) / 8.0)),
    "chosen by a sum": lambda tf, ops, x, w: ops.where(ops.sum(x) > 0, ops.sum(x * w), 2 * ops.mean(x * w)),
    "mean times rows": lambda tf, ops, x, w: ops.mean(x * w) * ops.cast(ops.shape(x)[0], "float32"),
    "largest of sums": lambda tf, ops, x, w: ops.max(ops.sum(x * w, axis=0)),
    "split": lambda tf, ops, x, w: ops.split(ops.sum(x * w, axis=0), 3)[1][0],
    "dot": lambda tf, ops, x, w: ops.dot(ops.abs(x[:, 1]), x[:, 0] * w[0]) / ops.sum(ops.abs(x[:, 1])),
    "tensordot of two axes": lambda tf, ops, x, w: tf.tensordot(x * w, ops.abs(x), 2),
    "einsum": lambda tf, ops, x, w: ops.einsum("i,i->", x[:, 0] * w[0], x[:, 1]),
    "einsum of transposed": lambda tf, ops, x, w: ops.sum(ops.square(ops.einsum("ji,ik->jk", ops.transpose(x * w), x))),
    "row by column": lambda tf, ops, x, w: ops.matmul(ops.abs(x[:, 1])[None], (x[:, 0] * w[0])[:, None])[0, 0],
    "vector by matrix": lambda tf, ops, x, w: ops.sum(ops.square(ops.matmul(x[:, 1], x * w))),
    "matrices": lambda tf, ops, x, w: ops.sum(
        ops.square(ops.matmul(ops.transpose(x * w)[None], ops.expand_dims(x, 0)))
    ),
    "map_fn": lambda tf, ops, x, w: ops.sum(tf.map_fn(lambda row: ops.sum(ops.square(row)), x * w)),
    "map_fn of vectors": lambda tf, ops, x, w: ops.sum(ops.square(tf.map_fn(lambda row: row[:2] * 2.0, x * w))),
    "vectorized_map": lambda tf, ops, x, w: ops.sum(tf.vectorized_map(lambda row: ops.sum(ops.square(row)), x * w)),
    "loop over columns": lambda tf, ops, x, w: ops.sum(tf.scan(lambda a, b: 0.5 * a + b, ops.transpose(x * w))),
    "end of a loop": lambda tf, ops, x, w: ops.sum(tf.foldl(lambda a, b: 0.5 * a + b, ops.transpose(x * w))),
    "sequences": lambda tf, ops, x, w: 0.1 * ops.sum(ops.square(_recurrent("LSTM", x, w, return_sequences=True))),
    "sequences through a matrix": lambda tf, ops, x, w: ops.sum(
        ops.matmul(_recurrent("GRU", x, w, return_sequences=True), ops.ones((4, 2)))
    ),
    "last output": lambda tf, ops, x, w: ops.sum(ops.square(_recurrent("LSTM", x, w))),
    "last state": lambda tf, ops, x, w: ops.sum(ops.square(_recurrent("GRU", x, w, return_state=True)[1])),
    "time before rows": lambda tf, ops, x, w: ops.sum(
        ops.square(ops.transpose(x * w)[:, :, None] @ ops.ones((1, 2)) + 1.0)
    ),
    "whether any": lambda tf, ops, x, w: (
        ops.mean(x * w) * ops.cast(ops.any(x > 1.8), "float32") + ops.cast(ops.all(x > -9.0), "float32")
    ),
    "largest of classes": lambda tf, ops, x, w: ops.sum(
        tf.maximum(tf.math.unsorted_segment_max(x * w, _class(ops, x), 2), -9.0)
    ),
    "smallest of classes": lambda tf, ops, x, w: ops.sum(
        tf.minimum(tf.math.unsorted_segment_min(x * w, _class(ops, x), 2), 9.0)
    ),
    "largest by index": lambda tf, ops, x, w: ops.sum(
        tf.tensor_scatter_nd_max(tf.fill([2, 3], -9.0), _class(ops, x)[:, None], x * w)
    ),
    "added by index": lambda tf, ops, x, w: ops.sum(
        ops.square(tf.tensor_scatter_nd_sub(tf.zeros([2, 3]), _class(ops, x)[:, None], x * w))
    ),
    "each of three": lambda tf, ops, x, w: ops.sum(x * w, axis=0) * 0.1,
}


def _class(ops: Any, x: Any) -> Any:
    return ops.cast(x[:, 0] > 0, "int32")


def _mask(ops: Any, x: Any) -> Any:
    return ops.cast(x > 0, "float32")


def _recurrent(kind: str, x: Any, w: Any, **options: Any) -> Any:
    """Returns the output of a recurrent layer over the numbers of each row."""
    import keras
    import tensorflow as tf

    key = (kind, *options)
    if key not in _layers:
        with tf.init_scope():
            _layers[key] = getattr(keras.layers, kind)(
                4, kernel_initializer=keras.initializers.GlorotUniform(0), **options
            )
            _layers[key].build((None, 3, 1))
    return _layers[key]((x * w)[:, :, None])


def _of_replica(replica: int, function: Callable[..., Any], rows: Any, others: Any = None) -> tuple[Any, Any, Any]:
    """Runs a step of one of two replicas.

    Returns:
        Its number, the gradient as an optimizer adds it up, and what it adds to the only sum (None if there is none).
    """
    import tensorflow as tf
    from keras import ops

    from tfdistkit.strategies.sync import step as steps
    from tfdistkit.strategies.sync.aggregates import global_numbers

    own: list[Any] = []

    class Step(steps.ReplicaStep):
        def sum_of_all(self, value: Any) -> Any:
            own.append(value)
            return value if others is None else value + tf.constant(others)

    weights = tf.Variable([0.5, -1.0, 2.0])

    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def traced(x: Any) -> Any:
        own.clear()  # A layer that is built here has it traced again.
        step = Step(tf.cast(tf.shape(x)[0], tf.float32), lambda own: tf.constant(8.0), 2, replica)
        step.in_keras_step = True
        with steps.running(step), tf.GradientTape() as tape:
            number = function(tf, ops, x, weights.read_value())
        whole = global_numbers.of_global_batch(step, number)
        share = tf.cast(step.share(), "float32")
        pairs = [(number, tf.ones_like(number))] if whole is None else whole.slopes()
        targets, slopes = map(list, zip(*pairs))
        gradient = tape.gradient(targets, weights, slopes, unconnected_gradients="zero") * share
        return number * share if whole is None else whole.value, gradient, own

    number, gradient, added = traced(rows)
    assert len(added) <= 1, "one collective"
    return number.numpy(), gradient.numpy(), added[0].numpy() if added else None


def _check(function: Callable[..., Any], is_sent: bool) -> None:
    import numpy as np
    import tensorflow as tf
    from keras import ops

    rows = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    parts = [rows[:5], rows[5:]]
    found = [_of_replica(i, function, part) for i, part in enumerate(parts)]
    assert [one[2] is not None for one in found] == [is_sent] * 2
    if is_sent:
        sent = [one[2] for one in found]
        found = [_of_replica(i, function, parts[i], sent[1 - i]) for i in range(2)]
    with tf.GradientTape() as tape:
        weights = tf.Variable([0.5, -1.0, 2.0])
        expected = function(tf, ops, tf.constant(rows), weights.read_value())
    gradient = tape.gradient(expected, weights, unconnected_gradients="zero")
    for number in [one[0] for one in found] if is_sent else [found[0][0] + found[1][0]]:
        assert np.allclose(number, expected, rtol=2e-6, atol=1e-6), (number, expected)
    assert np.allclose(found[0][1] + found[1][1], gradient, rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize("name", MEANS)
def test_means_are_left_to_the_mean_of_the_replicas(name: str) -> None:
    _check(MEANS[name], False)


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_are_those_of_the_global_batch(name: str) -> None:
    _check(OTHERS[name], True)
