"""What a trial of a step runs on each rank before the ranks begin together (`strategies.step_check.local_part`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.strategies.step_check.local_part import local_part

pytestmark = pytest.mark.tensorflow

ROWS = tf.TensorSpec([None, 4], tf.float32)
X = np.arange(12, dtype="float32").reshape(3, 4)


def collective(x: tf.Tensor) -> tf.Tensor:
    """Stands for a collective: an operation with a state, which must not run."""

    def fail(value: Any) -> Any:
        raise AssertionError("it ran without the other ranks")

    return tf.ensure_shape(tf.numpy_function(fail, [x], tf.float32), x.shape)


def at_call() -> tf.Tensor:
    """Returns a value that is computed at each call of the function, as keys of collectives in loops are."""
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.capture_call_time_value(lambda: tf.constant(9.0), tf.TensorSpec([], tf.float32))


def part_of(function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    return local_part(tf.compat.v1.wrap_function(function, [ROWS]), 1)


FAILING: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "top_k": lambda x: tf.math.top_k(x[:, 0], 5)[0],
    "row": lambda x: x[5],
    "pairs": lambda x: tf.reshape(x[:, :1], [-1, 2]),
    "split": lambda x: tf.split(x, 2)[0],
    "before_a_collective": lambda x: collective(tf.gather(x, [0, 7])),
    "beside_a_collective": lambda x: collective(x)[:1] + tf.math.top_k(x[:, 0], 5)[0][0],
}


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_for_some_rows_fails_before_any_collective(name: str) -> None:
    part = part_of(FAILING[name])
    with pytest.raises(tf.errors.InvalidArgumentError):
        part(tf.constant(X))


QUIET: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "dense": lambda x: tf.nn.relu(tf.matmul(x, tf.ones((4, 2)))),
    "column": lambda x: x[:, 0] + tf.reshape(x, [-1, 2, 2])[:, 0, 0],
    "after_a_collective": lambda x: tf.math.top_k(collective(x)[:, 0], 5)[0],
    "of_a_call": lambda x: tf.gather(x, tf.cast(at_call(), tf.int32)),
    "unused": lambda x: x if tf.math.top_k(x[:, 0], 5) else x,
}


@pytest.mark.parametrize("name", QUIET)
def test_nothing_runs_where_nothing_fails(name: str) -> None:
    assert part_of(QUIET[name]) is None
