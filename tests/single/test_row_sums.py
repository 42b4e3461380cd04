"""Which values that a step writes to the state of a layer add up over the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow


def _sums(ops: Any, tf: Any) -> dict[str, Callable[..., Any]]:
    return {
        "sum": lambda x, state: state + ops.sum(x, axis=0),
        "moving_sum": lambda x, state: 0.9 * state + 0.1 * ops.sum(x, axis=0),
        "moving_difference": lambda x, state: state + (ops.sum(x, axis=0) - state) * 0.1,
        "over_all": lambda x, state: state + ops.sum(x),
        "product_of_rows": lambda x, state: state + ops.matmul(ops.transpose(x), x)[0:1],
        "transposed_product": lambda x, state: state + tf.reshape(tf.matmul(x, x, transpose_a=True), [-1])[:4],
        "tensordot": lambda x, state: state + ops.sum(ops.tensordot(x, x, axes=[[0], [0]]), axis=0),
        "dot": lambda x, state: state + ops.dot(ops.transpose(x), x)[0],
        "product_of_transposed": lambda x, state: state + ops.matmul(ops.transpose(x), x[:, :1])[:, 0],
        "of_transposed": lambda x, state: state + ops.sum(ops.transpose(x), axis=1),
        "histogram": lambda x, state: (
            state + ops.cast(tf.histogram_fixed_width(x[:, 0], [-2.0, 2.0], nbins=4), "float32")
        ),
        "stacked": lambda x, state: state + ops.sum(ops.stack([ops.sum(x, 0), ops.sum(x * x, 0)]), axis=0),
        "stacked_with_a_mean": lambda x, state: state + ops.sum(ops.stack([ops.sum(x, 0), ops.mean(x, 0)]), axis=0),
        "joined": lambda x, state: state + ops.concatenate([ops.sum(x, 0), state])[2:6],
        "scaled_by_another_size": lambda x, state: state + ops.sum(x / tf.cast(tf.shape(x)[1], "float32"), axis=0),
        "divided_by_another_size": lambda x, state: state + ops.sum(x, axis=0) / tf.cast(tf.shape(x)[1], "float32"),
        "einsum_with_a_constant": lambda x, state: state + ops.einsum("bd,dk->k", x, ops.ones((4, 4))),
        "einsum_of_one": lambda x, state: state + ops.einsum("bi->i", x),
        "scaled_by_a_size": lambda x, state: state + ops.sum(x / tf.sqrt(tf.cast(tf.shape(x)[-1], "float32")), axis=0),
        "chosen_by_a_mean": lambda x, state: (
            state + ops.sum(ops.one_hot(ops.argmax(x / ops.cast(ops.shape(x)[0], "float32"), -1), 4), axis=0)
        ),
        "einsum": lambda x, state: state + ops.sum(ops.einsum("bi,bj->ij", x, x), axis=0),
        "number_of_rows": lambda x, state: state + ops.cast(ops.shape(x)[0], "float32"),
        "bincount": lambda x, state: (
            state + ops.cast(ops.bincount(ops.cast(x[:, 0], "int32"), minlength=4), "float32")[:4]
        ),
        "by_a_constant": lambda x, state: state + ops.sum(x, axis=0) / 32.0,
        "mean_too": lambda x, state: state + ops.sum(x, axis=0) + ops.mean(x, axis=0),
        "broadcast": lambda x, state: ops.sum(state + ops.sum(x)) + state,
        "of_means_of_rows": lambda x, state: state + ops.sum(ops.mean(x, axis=1)),
        "of_a_deep_network": lambda x, state: state + ops.sum(_deep(x, ops), axis=0),
        "scattered": lambda x, state: tf.tensor_scatter_nd_add(0.9 * state, _classes(x, ops), x[:, 1]),
        "scattered_and_subtracted": lambda x, state: tf.tensor_scatter_nd_sub(
            state, _classes(x, ops), 0.1 * (tf.gather(state, ops.cast(x[:, 0], "int32")) - x[:, 1])
        ),
        "scattered_twice": lambda x, state: tf.tensor_scatter_nd_sub(
            tf.tensor_scatter_nd_add(state, _classes(x, ops), x[:, 1]), _classes(x, ops), ops.ones_like(x[:, 0])
        ),
        "sums_scattered": lambda x, state: tf.tensor_scatter_nd_sub(state, [[0], [2]], ops.sum(x, axis=0)[:2]),
        "scattered_into_zeros": lambda x, state: (
            state + tf.tensor_scatter_nd_add(tf.zeros([4]), _classes(x, ops), x[:, 1])
        ),
        "segments": lambda x, state: state - tf.math.unsorted_segment_sum(x[:, 1], ops.cast(x[:, 0], "int32"), 4),
        "segments_of_sparse": lambda x, state: (
            state
            + tf.sparse.segment_sum(x, tf.range(tf.shape(x)[0]), tf.zeros_like(x[:, 0], tf.int32), num_segments=1)[0]
        ),
        "sparse_product": lambda x, state: state + tf.sparse.sparse_dense_matmul(_sparse(x, tf), x, adjoint_a=True)[0],
        "of_rows_and_state": lambda x, state: state + ops.sum((x - state) * x, axis=0),
    }


def _others(ops: Any, tf: Any) -> dict[str, Callable[..., Any]]:
    from tfdistkit.strategies.sync import step as steps

    def gradient(x: Any, state: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(state)
            loss = ops.mean(ops.square(x * state))
        gradient = tape.gradient(loss, state)
        if step := steps.current():
            step.gradients[gradient.name] = False  # As the hook of GradientTape does.
        return state + gradient

    return {
        "mean": lambda x, state: 0.9 * state + 0.1 * ops.mean(x, axis=0),
        "mean_by_hand": lambda x, state: state + ops.sum(x, axis=0) / ops.cast(ops.shape(x)[0], "float32"),
        "mean_divided_first": lambda x, state: state + ops.sum(x / ops.cast(ops.shape(x)[0], "float32"), axis=0),
        "masked_mean": lambda x, state: state + ops.sum(x, axis=0) / ops.sum(ops.cast(x > 1.0, "float32")),
        "of_features": lambda x, state: state + ops.sum(ops.mean(x, axis=0)),
        "weighted_mean": lambda x, state: state + ops.sum(x * (x[:, :1] / ops.sum(x[:, :1])), axis=0),
        "centroids": lambda x, state: state + ops.matmul(ops.transpose(x / ops.sum(x, axis=0, keepdims=True)), x)[0],
        "attention": lambda x, state: state + ops.sum(ops.softmax(ops.transpose(x), axis=-1) @ x, axis=0),
        "frequencies": lambda x, state: tf.tensor_scatter_nd_add(
            state, ops.cast(x[:, :1], "int32"), ops.ones_like(x[:, 0]) / ops.cast(ops.shape(x)[0], "float32")
        ),
        "histogram": lambda x, state: (
            state + _normalized(ops.bincount(ops.cast(x[:, 0], "int32"), minlength=4), ops)[:4]
        ),
        "over_time": lambda x, state: state + ops.sum(ops.mean(tf.reshape(x, [-1, tf.shape(x)[1], 1]), axis=0)),
        "largest": lambda x, state: ops.maximum(state, ops.max(x, axis=0)),
        "constant": lambda x, state: state + 1.0,
        "gradient": gradient,
    }


def _classes(x: Any, ops: Any) -> Any:
    return ops.cast(x[:, :1], "int32")


def _sparse(x: Any, tf: Any) -> Any:
    places = tf.stack([tf.range(tf.shape(x)[0]), tf.cast(x[:, 0], tf.int32)], axis=1)
    return tf.sparse.SparseTensor(tf.cast(places, tf.int64), x[:, 1], tf.cast([tf.shape(x)[0], 4], tf.int64))


def _deep(x: Any, ops: Any) -> Any:
    for _ in range(700):  # Deeper than Python's stack.
        x = ops.relu(x) + 0.001
    return x


def _normalized(counts: Any, ops: Any) -> Any:
    counts = ops.cast(counts, "float32")
    return counts / ops.sum(counts)


def _merged(value_of: Callable[..., Any], static: bool) -> list[Any] | None:
    """Returns what two replicas write, of 4 and 4 rows, and what one process does with 8; None for no sum."""
    import numpy as np
    import tensorflow as tf

    from tfdistkit.strategies.sync import step as steps
    from tfdistkit.strategies.sync.aggregates import row_sums

    rows = np.random.default_rng(0).uniform(0, 4, (8, 4)).astype("float32")
    state = np.arange(4, dtype="float32")
    found: list[Any] = []
    parts: list[Any] = []

    class Step(steps.ReplicaStep):
        def sum(self, value: Any) -> Any:
            parts.append(value)
            return value

        def weighted_sum(self, value: Any) -> Any:
            parts.append(value * 0.5)
            return value * 0.5

    @tf.function(input_signature=[tf.TensorSpec([4 if static else None, 4])], autograph=False)
    def of_replica(x: Any) -> Any:
        step = Step(tf.cast(tf.shape(x)[0], tf.float32), lambda own: tf.constant(8.0), 2, 0, 4 if static else None)
        parts.clear()
        with steps.running(step):
            value = value_of(x, kept.read_value())
        merged = row_sums.of_global_batch(step, value)
        if merged is None:
            found.append(None)
            return value, value
        return merged, merged - tf.add_n([tf.broadcast_to(part, tf.shape(merged)) for part in parts])

    kept = tf.Variable(state)
    results = [of_replica(rows[:4]), of_replica(rows[4:])]
    if found:
        return None
    own, constant = (np.asarray(results[0][i]) for i in (0, 1))
    both = own + np.asarray(results[1][0]) - constant
    return [both, np.asarray(value_of(tf.constant(rows), tf.constant(state)))]


@pytest.mark.parametrize("name", sorted(_sums(None, None)))
def test_what_adds_up_is_summed(name: str) -> None:
    import numpy as np
    import tensorflow as tf
    from keras import ops

    merged = _merged(_sums(ops, tf)[name], False)
    assert merged is not None
    np.testing.assert_allclose(merged[0], np.broadcast_to(merged[1], merged[0].shape), rtol=1e-5)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", sorted(_others(None, None)))
def test_other_state_is_left_to_the_mean(name: str, static: bool) -> None:
    import tensorflow as tf
    from keras import ops

    assert _merged(_others(ops, tf)[name], static) is None


@pytest.mark.parametrize("name", ("weighted_mean", "centroids", "histogram", "gradient", "mean", "over_time"))
def test_statistics_are_no_rows(name: str) -> None:
    import tensorflow as tf
    from keras import ops

    from tfdistkit.strategies.sync import step as steps
    from tfdistkit.strategies.sync.aggregates import row_sums

    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([4])], autograph=False)
    def stores(x: Any, state: Any) -> Any:
        step = steps.ReplicaStep(tf.constant(4.0), lambda own: tf.constant(8.0), 2, 0)
        with steps.running(step):
            return tf.constant(row_sums.holds_rows(step, _others(ops, tf)[name](x, state)))

    assert not stores(tf.ones([4, 4]), tf.ones([4]))
