"""The traces of a step do not depend on which batch comes first, also where Keras takes batches out of the iterator."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tfdistkit.strategies.sync.step_traces import for_dataset

pytestmark = pytest.mark.tensorflow


def _of_keras(step: Any) -> Any:
    """Returns a function as Keras 3.16 makes it: the step is traced for the batch that comes first."""
    traced = tf.function(step, reduce_retracing=True)

    def function(iterator: Any) -> Any:
        if isinstance(iterator, tf.data.Iterator):
            return traced(iterator.get_next())
        return next(traced(data) for data in iterator)

    return function


def _dataset(*rows: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        lambda: (tf.ones([n, 2]) for n in rows), output_signature=tf.TensorSpec([None, 2])
    )


@pytest.mark.parametrize("rows", [(3, 3, 1), (1, 3)])
def test_a_step_is_traced_once_for_any_rows(rows: tuple[int, ...]) -> None:
    shapes: list[list[int | None]] = []

    def step(data: tf.Tensor) -> tf.Tensor:
        shapes.append(data.shape.as_list())
        return tf.reduce_sum(data)

    function, iterator = for_dataset(_of_keras(step)), iter(_dataset(*rows))
    assert [float(function(iterator)) for _ in rows] == [2.0 * n for n in rows]
    assert shapes == [[None, 2]]
    with pytest.raises(StopIteration):
        function(iterator)


def test_a_step_that_cannot_be_traced_takes_no_batch() -> None:
    tries: list[int] = []

    def step(data: tf.Tensor) -> tf.Tensor:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not yet")
        return tf.reduce_sum(data)

    function, iterator = for_dataset(_of_keras(step)), iter(_dataset(3, 1))
    with pytest.raises(ValueError, match="not yet"):
        function(iterator)
    assert [float(function(iterator)) for _ in range(2)] == [6.0, 2.0]
