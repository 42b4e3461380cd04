"""What `predict` returns for outputs that are not one entry per row (see `test_two_devices`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdistkit
from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(3).normal(size=(15, 4)).astype("float32")

SAME: dict[str, Callable[..., Any]] = {
    "a table": lambda model, z: {"z": z, "table": model.table * 2.0},
    "a table alone": lambda model, z: ops.ones((3, 2)),
    "a number": lambda model, z: (z, ops.sum(model.table)),
    "some for each row": lambda model, z: [ops.take(model.table, ops.argmax(z, -1), axis=0), ops.reshape(z, (-1,))],
    "rows that the data chooses": lambda model, z: tf.boolean_mask(z, z[:, 0] > 0),
}
REFUSED: dict[str, Callable[..., Any]] = {
    "a mean of all rows": lambda model, z: {"z": z, "mean": ops.mean(z)},
    "a mean of each column": lambda model, z: {"z": z, "mean": ops.mean(z, axis=0)},
    "the number of rows": lambda model, z: {"z": z, "mean": ops.shape(z)[0]},
}


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


class Predicting(keras.Model):
    """Returns what a function makes of its predictions."""

    def __init__(self, outputs: Callable[..., Any]):
        super().__init__()
        self.dense, self.outputs_of = keras.layers.Dense(2, kernel_initializer="ones"), outputs
        self.table = self.add_weight(shape=(5, 2), initializer="ones", name="table")

    def call(self, inputs: Any) -> Any:
        return self.outputs_of(self, self.dense(inputs))


def _predicted(scope: Any, outputs: Callable[..., Any], of_a_batch: bool = False, **options: Any) -> list[Any]:
    with scope:
        model = Predicting(outputs)
        model.compile(**options)
    found = model.predict_on_batch(X) if of_a_batch else model.predict(X, batch_size=4, verbose=0)
    return [np.asarray(one) for one in tf.nest.flatten(found)]


@pytest.mark.parametrize("options", ({}, {"steps_per_execution": 2}, {"of_a_batch": True}), ids=str)
@pytest.mark.parametrize("name", SAME)
def test_outputs_of_no_row_come_once(strategy: Any, name: str, options: dict[str, Any]) -> None:
    expected = _predicted(tf.distribute.get_strategy().scope(), SAME[name], **options)
    for one, other in zip(_predicted(strategy.scope(), SAME[name], **options), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_of_the_rows_of_a_replica_are_refused(strategy: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"`predict` on 2 replicas must have an entry for each row.*\['mean'\]"):
        _predicted(strategy.scope(), REFUSED[name])


def test_a_number_of_an_eager_step_is_refused(strategy: Any) -> None:
    with pytest.raises(UnsupportedError, match="must have an entry for each row"):
        _predicted(strategy.scope(), REFUSED["a mean of all rows"], run_eagerly=True)
