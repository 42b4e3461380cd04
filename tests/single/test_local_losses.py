"""Which losses of a step warn that they compare the rows of one replica with each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow

COMPARE = {
    "products of pairs": lambda tf, ops, x, w: ops.mean(ops.abs(ops.matmul(x * w, ops.transpose(x * w)))),
    "pairs by einsum": lambda tf, ops, x, w: ops.mean(ops.abs(ops.einsum("id,jd->ij", x * w, x * w))),
    "differences": lambda tf, ops, x, w: (lambda s: ops.mean(ops.softplus(s[:, None] - s)))(x[:, 0] * w[0]),
    "differences of vectors": lambda tf, ops, x, w: (lambda z: ops.mean(ops.square(z[:, None] - z[None])))(x * w),
    "a column and its transpose": lambda tf, ops, x, w: (lambda z: ops.mean(ops.abs(z - ops.transpose(z))))(
        x[:, :1] * w[0]
    ),
    "equal labels": lambda tf, ops, x, w: ops.mean(
        ops.sum(ops.cast(ops.equal(x[:, :1] > 0, x[None, :, 0] > 0), "float32"), 1) * x[:, 0] * w[0]
    ),
    "a softmax over rows": lambda tf, ops, x, w: ops.sum(ops.softmax(x * w, axis=0) * x),
    "a norm by sorted rows": lambda tf, ops, x, w: ops.mean(x * w / ops.sort(x[:, 0])[0]),
}
APART = {
    # Computed again for the global batch.
    "variance": lambda tf, ops, x, w: ops.mean(ops.var(x * w, axis=0)),
    "weights by counts": lambda tf, ops, x, w: ops.mean(
        x[:, 0] * w[0] * tf.gather(1 / (1 + ops.sum(ops.one_hot(ops.argmax(x, 1), 3), 0)), ops.argmax(x, 1))
    ),
    "mean": lambda tf, ops, x, w: ops.mean(ops.square(x * w)),
    "sum": lambda tf, ops, x, w: ops.sum(ops.square(x * w)),
    "pairs of columns": lambda tf, ops, x, w: (lambda z: ops.mean(ops.square(z[:, :, None] - z[:, None])))(x * w),
    "differences of columns": lambda tf, ops, x, w: ops.mean(x[:, :1] * w[0] - x[:, 1:]),
    "to prototypes": lambda tf, ops, x, w: ops.mean(ops.square((x * w)[:, None] - ops.ones((1, 4, 3)))),
    "a softmax of each row": lambda tf, ops, x, w: ops.sum(ops.softmax(x * w) * x),
    "a mask of lengths": lambda tf, ops, x, w: ops.mean(
        ops.sum(tf.sequence_mask(ops.cast(ops.abs(x[:, 0]), "int32") + 1, dtype="float32"), 1) * x[:, 1] * w[1]
    ),
    "columns before rows": lambda tf, ops, x, w: ops.mean(ops.square(ops.transpose(x * w) - x[:, 0])),
}


def _warnings(function: Callable[..., Any]) -> list[str]:
    """Returns the warnings of a loss of a replica."""
    import tensorflow as tf
    from keras import ops

    from tfdistkit.strategies.sync import step as steps
    from tfdistkit.strategies.sync.aggregates import local_losses

    @tf.function(input_signature=[tf.TensorSpec([None, 3])], autograph=False)
    def traced(x: Any) -> Any:
        step = steps.ReplicaStep(tf.cast(tf.shape(x)[0], tf.float32), lambda own: tf.constant(8.0), 2, 0)
        step.in_keras_step = True
        with steps.running(step):
            number = function(tf, ops, x, weights.read_value())
        local_losses.warn(step, [number])
        return number

    weights = tf.Variable([0.5, -1.0, 2.0])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        traced.get_concrete_function()
    return [str(one.message) for one in found if "compares rows" in str(one.message)]


@pytest.mark.parametrize("name", COMPARE)
def test_a_comparison_of_rows_warns(name: str) -> None:
    assert len(_warnings(COMPARE[name])) == 1


@pytest.mark.parametrize("name", APART)
def test_rows_that_stay_apart_do_not(name: str) -> None:
    assert _warnings(APART[name]) == []
