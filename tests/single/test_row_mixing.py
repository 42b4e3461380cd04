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
    "softmax of each row": lambda tf, ops, y, p: -ops.sum(ops.softmax(y) * ops.log_softmax(p), -1),
    "hardest classes": lambda tf, ops, y, p: ops.mean(tf.math.top_k(ops.square(y - p), 2)[0], -1),
    "sorted classes": lambda tf, ops, y, p: ops.mean(ops.square(ops.sort(y, -1) - ops.sort(p, -1)), -1),
    "cross entropy": lambda tf, ops, y, p: tf.nn.sparse_softmax_cross_entropy_with_logits(ops.argmax(y, -1), p),
    "one class": lambda tf, ops, y, p: ops.take_along_axis(p, ops.argmax(y, -1)[:, None], axis=1)[:, 0],
    "class by its place": lambda tf, ops, y, p: tf.gather_nd(
        p, tf.stack([tf.range(tf.shape(p)[0]), tf.argmax(y, -1, tf.int32)], 1)
    ),
    "sequence of classes": lambda tf, ops, y, p: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.cast(y > 0, "int32"), tf.stack([p, p, p, p], -1)
    ),
    "gathered class": lambda tf, ops, y, p: tf.gather(p, tf.argmax(y, -1), batch_dims=1),
    "products of rows": lambda tf, ops, y, p: ops.einsum("bi,bi->b", y, p),
    "by a matrix": lambda tf, ops, y, p: ops.sum(ops.square(ops.matmul(y - p, ops.ones((3, 4)))), -1),
    "split": lambda tf, ops, y, p: ops.abs(ops.split(p, 3, axis=-1)[0] - y[..., :1])[:, 0],
    "stacked": lambda tf, ops, y, p: ops.sum(ops.stack([y, p], axis=-1), axis=(1, 2)),
    "outer products": lambda tf, ops, y, p: ops.sum(p[:, :, None] * y[:, None, :], axis=(1, 2)),
    "repeated columns": lambda tf, ops, y, p: ops.mean(tf.tile(p, [1, 2]) - tf.repeat(y, 2, axis=1), -1),
    "differences": lambda tf, ops, y, p: ops.mean(ops.abs(p[:, 1:] - p[:, :-1]), -1),
    "divided by the features": lambda tf, ops, y, p: ops.sum(y - p, -1) / ops.cast(ops.shape(p)[-1], "float32"),
    "divided by the entries of a row": lambda tf, ops, y, p: (
        ops.sum(y - p, -1) / tf.cast(tf.reduce_prod(tf.shape(p)[1:]), "float32")
    ),
    "two tensors of the kept rows": lambda tf, ops, y, p: (
        lambda keep: tf.boolean_mask(y, keep) - tf.boolean_mask(p, keep)
    )(y[:, 0] > 0),
    "a shape of its own": lambda tf, ops, y, p: ops.reshape(y - p, (ops.shape(y)[0], -1, 3)),
    "dots": lambda tf, ops, y, p: p[..., 1:] - y[..., :1],
    "images": lambda tf, ops, y, p: ops.mean(
        ops.average_pool(ops.reshape(p, (-1, 3, 1, 1)), (3, 1), padding="valid"), (1, 2, 3)
    ),
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
    "mean times rows": lambda tf, ops, y, p: ops.mean(y - p) * ops.cast(ops.shape(p)[0], "float32"),
    "each (mean times rows)": lambda tf, ops, y, p: ops.square(y - p) * tf.cast(tf.shape(p)[0], "float32"),
    "mean by the root of the rows": lambda tf, ops, y, p: (
        ops.mean(y - p) / ops.sqrt(ops.cast(ops.shape(p)[0], "float32"))
    ),
    "mean times entries": lambda tf, ops, y, p: ops.mean(y - p) * tf.cast(tf.size(p), "float32"),
    "mean times rows less one": lambda tf, ops, y, p: ops.mean(y - p) * tf.cast(tf.shape(p)[0] - 1, "float32"),
    "all but the first, of a vector": lambda tf, ops, y, p: p[:, 0][..., 1:] - y[:, 0][..., :-1],
    "half as many rows": lambda tf, ops, y, p: ops.std(ops.reshape(p, (ops.shape(p)[0] // 2, 2, -1)), (1, 2)),
    "two masks": lambda tf, ops, y, p: tf.boolean_mask(p, y[:, 0] > 0) - tf.boolean_mask(p, y[:, 0] <= 0),
    "one after the other": lambda tf, ops, y, p: ops.concatenate([y, p], 0) - ops.repeat(p, 2, 0),
    "pairs": lambda tf, ops, y, p: ops.mean(ops.square(p[:, None] - p[None]), (1, 2)),
    "similarities": lambda tf, ops, y, p: tf.reduce_logsumexp(tf.matmul(p, p, transpose_b=True), 1),
    "transposed": lambda tf, ops, y, p: tf.reduce_logsumexp(p @ tf.transpose(y), 1),
    "centered": lambda tf, ops, y, p: ops.mean(ops.square(p - ops.mean(p, 0)), -1),
    "mean of kept": lambda tf, ops, y, p: ops.mean(tf.boolean_mask(ops.square(y - p)[:, 0], y[:, 0] > 0)),
    "neighbours": lambda tf, ops, y, p: ops.mean(ops.square(p[1:] - p[:-1]), -1),
    "reversed": lambda tf, ops, y, p: ops.mean(ops.square(p - tf.reverse(y, [0])), -1),
    "shuffled": lambda tf, ops, y, p: ops.mean(ops.square(p - tf.gather(y, tf.range(tf.shape(y)[0])[::-1])), -1),
    "cumulative": lambda tf, ops, y, p: ops.mean(tf.cumsum(p), -1),
    "hardest rows": lambda tf, ops, y, p: tf.math.top_k(ops.mean(ops.square(y - p), -1), 2)[0],
    "sorted rows": lambda tf, ops, y, p: ops.square(ops.sort(y[:, 0]) - ops.sort(p[:, 0])),
    "sorted down": lambda tf, ops, y, p: ops.square(ops.sort(y, axis=0) - ops.sort(p, axis=0)),
    "weights over rows": lambda tf, ops, y, p: ops.softmax(ops.mean(y - p, -1)) * ops.mean(y - p, -1),
    "weights down": lambda tf, ops, y, p: ops.mean(ops.softmax(y - p, axis=0) * p, -1),
    "all pairs": lambda tf, ops, y, p: ops.mean(ops.softplus(p[:, 0][:, None] - p[:, 0])),
    "all pairs of columns": lambda tf, ops, y, p: ops.square(p[:, :1] - ops.transpose(p[:, :1])),
    "all pairs by repeating": lambda tf, ops, y, p: (
        tf.repeat(p[:, 0], tf.shape(p)[0]) - tf.tile(p[:, 0], [tf.shape(p)[0]])
    ),
    "all pairs at a new place": lambda tf, ops, y, p: ops.square(ops.expand_dims(p, 1) - ops.expand_dims(y, 0)),
    "one row of all": lambda tf, ops, y, p: ops.mean(ops.square(p - tf.gather(y, 0)), -1),
    "turned round": lambda tf, ops, y, p: ops.square(
        p - tf.gather_nd(y, (tf.shape(y)[0] - 1 - tf.range(tf.shape(y)[0]))[:, None])
    ),
    "padded": lambda tf, ops, y, p: ops.mean(ops.pad(p, [[1, 0], [0, 0]]), -1),
    "a partner of each row": lambda tf, ops, y, p: tf.gather_nd(p, tf.argmax(y, -1)[:, None]),
    "upside down": lambda tf, ops, y, p: ops.mean(ops.square(p - y[::-1]), -1),
    "two rows at a time": lambda tf, ops, y, p: ops.std(ops.reshape(ops.square(y - p), (-1, 6)), -1),
    "standard deviations": lambda tf, ops, y, p: ops.square(ops.std(ops.transpose(p), -1) - ops.std(y, 0)),
    "products over rows": lambda tf, ops, y, p: ops.einsum("bi,bj->ij", y, p),
    "with a constant row": lambda tf, ops, y, p: ops.concatenate([p, ops.ones((1, 3))], axis=0),
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


@pytest.mark.parametrize("rows", [None, 8, 1])
@pytest.mark.parametrize("name", OF_ROWS)
def test_losses_of_rows(name: str, rows: int | None) -> None:
    assert _kind(OF_ROWS[name], rows) == "ROWS"


@pytest.mark.parametrize("rows", [None, 8, 1])
@pytest.mark.parametrize("name", MEANS)
def test_means_of_rows(name: str, rows: int | None) -> None:
    assert _kind(MEANS[name], rows) == "MEAN"


@pytest.mark.parametrize(
    ("name", "rows"),
    # One row has no two hardest ones, and is taken for a combination before (`has_single_rows`).
    [
        (name, rows)
        for name in MIXED
        for rows in (None, 8, 1)
        if rows != 1 or not any(word in name for word in ("hardest", "two rows", "half", "mean times", "by the root"))
    ],
)
def test_losses_that_combine_rows(name: str, rows: int | None) -> None:
    assert _kind(MIXED[name], rows) == "MIXED"


def test_a_mapped_loss_can_be_read() -> None:
    def loss(tf: Any, ops: Any, y: Any, p: Any) -> Any:
        return ops.vectorized_map(lambda z: ops.mean(ops.square(z[0] - z[1])), (y, p))

    assert {_kind(loss, rows) for rows in (None, 8)} <= {"ROWS", "MEAN", "MIXED"}


def test_constants() -> None:
    assert _kind(lambda tf, ops, y, p: tf.constant(2.0) * ops.cast(ops.shape(y)[1], "float32"), None) == "CONSTANT"


def test_a_static_number_of_rows_is_no_constant() -> None:
    """In Python, `p.shape[0]` is a number; a temperature of the same value costs a gather."""
    assert _kind(lambda tf, ops, y, p: ops.mean(y - p) * p.shape[0], 8) == "MIXED"
    assert _kind(lambda tf, ops, y, p: ops.square(y - p) / p.shape[0], 8) == "MIXED"
    assert _kind(lambda tf, ops, y, p: ops.mean(y - p) * 7.0, 8) == "MEAN"


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
