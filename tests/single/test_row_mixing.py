"""Which losses are computed from the rows of all replicas: those whose graph combines rows, and no others."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow

OF_ROWS = {
    "row errors": lambda tf, ops, y, p: ops.mean(ops.abs(y - p) ** 1.5, axis=-1),
    "pixels": lambda tf, ops, y, p: ops.square(y - p),
    "quantiles": lambda tf, ops, y, p: ops.mean(ops.maximum(0.9 * (y - p), -0.1 * (y - p)), axis=-1),
    "normalized rows": lambda tf, ops, y, p: -ops.sum(tf.math.l2_normalize(y, 1) * tf.math.l2_normalize(p, 1), -1),
    "columns": lambda tf, ops, y, p: tf.nn.relu(p[:, 0] - y[:, 1]),
    "kept rows": lambda tf, ops, y, p: tf.boolean_mask(ops.square(y - p)[:, 0], y[:, 0] > 0),
    "flat": lambda tf, ops, y, p: ops.reshape(ops.square(y - p), (-1,)),
    "focal": lambda tf, ops, y, p: (1 - ops.exp(-ops.sum(y * p, -1))) ** 2 * ops.sum(y * p, -1),
}
MEANS = {
    "mean": lambda tf, ops, y, p: ops.mean(ops.square(y - p)),
    "means": lambda tf, ops, y, p: 0.5 * ops.mean(ops.square(y - p)) + tf.reduce_mean(ops.abs(p)) / 3.0,
    "columns": lambda tf, ops, y, p: ops.sum(ops.mean(ops.square(y - p), axis=0) * tf.constant([1.0, 2.0, 3.0])),
}
MIXED = {
    "sum": lambda tf, ops, y, p: ops.sum(ops.square(y - p)),
    "quotient": lambda tf, ops, y, p: ops.sum(y * p) / ops.sum(y),
    "root of a mean": lambda tf, ops, y, p: ops.sqrt(ops.mean(ops.square(y - p))),
    "product of means": lambda tf, ops, y, p: ops.mean(y) * ops.mean(p),
    "row and batch": lambda tf, ops, y, p: ops.mean(ops.square(y - p), -1) + ops.max(p),
    "pairs": lambda tf, ops, y, p: ops.mean(ops.square(p[:, None] - p[None]), (1, 2)),
    "similarities": lambda tf, ops, y, p: tf.reduce_logsumexp(tf.matmul(p, p, transpose_b=True), 1),
    "transposed": lambda tf, ops, y, p: tf.reduce_logsumexp(p @ tf.transpose(y), 1),
    "centered": lambda tf, ops, y, p: ops.mean(ops.square(p - ops.mean(p, 0)), -1),
    "mean of kept": lambda tf, ops, y, p: ops.mean(tf.boolean_mask(ops.square(y - p)[:, 0], y[:, 0] > 0)),
    "neighbours": lambda tf, ops, y, p: ops.mean(ops.square(p[1:] - p[:-1]), -1),
    "reversed": lambda tf, ops, y, p: ops.mean(ops.square(p - tf.reverse(y, [0])), -1),
    "shuffled": lambda tf, ops, y, p: ops.mean(ops.square(p - tf.gather(y, tf.range(tf.shape(y)[0])[::-1])), -1),
    "cumulative": lambda tf, ops, y, p: ops.mean(tf.cumsum(p), -1),
    "in a function": lambda tf, ops, y, p: tf.function(lambda a, b: ops.mean(a - b, -1))(y, p),
    "in python": lambda tf, ops, y, p: tf.numpy_function(lambda a, b: a - b, [y, p], tf.float32),
}


def _kind(loss: Any, rows: int | None) -> str:
    import tensorflow as tf
    from keras import ops

    from tfdistkit.strategies.losses.row_mixing import kind_of

    found = []

    @tf.function
    def trace(y: Any, p: Any) -> Any:
        found.append(kind_of(loss(tf, ops, y, p), [y, p], [], rows).name)
        return y

    trace.get_concrete_function(*[tf.TensorSpec([rows, 3])] * 2)
    return found[0]


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("name", OF_ROWS)
def test_losses_of_rows(name: str, rows: int | None) -> None:
    assert _kind(OF_ROWS[name], rows) == "ROWS"


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("name", MEANS)
def test_means_of_rows(name: str, rows: int | None) -> None:
    assert _kind(MEANS[name], rows) == "MEAN"


@pytest.mark.parametrize("rows", [None, 7])
@pytest.mark.parametrize("name", MIXED)
def test_losses_that_combine_rows(name: str, rows: int | None) -> None:
    assert _kind(MIXED[name], rows) == "MIXED"


def test_constants() -> None:
    assert _kind(lambda tf, ops, y, p: tf.constant(2.0) * ops.cast(ops.shape(y)[0], "float32"), None) == "CONSTANT"


def test_values_that_are_known_already() -> None:
    """A function that returns the result of a loss of Keras, in a `tf.function` of the user."""
    import tensorflow as tf

    from tfdistkit.strategies.losses.row_mixing import kind_of

    found = []

    @tf.function
    def trace(y: Any, p: Any) -> Any:
        error = y - p
        mean = tf.reduce_mean(error * error)
        found.append(kind_of(mean, [y, p], [mean], 7).name)
        return mean

    trace.get_concrete_function(*[tf.TensorSpec([7, 3])] * 2)
    assert found == ["MEAN"]
