"""Models that call methods of ragged tensors, which Keras cannot build ahead of a step (see `test_two_devices`)."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _own_steps import fresh_session, strategy

__all__ = ["fresh_session", "strategy"]  # The fixtures.

pytestmark = pytest.mark.tensorflow

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 6, 20)
WORDS = RNG.integers(0, 9, LENGTHS.sum()).astype("int32")
Y = RNG.normal(size=(20, 1)).astype("float32")


class MeanOfWords(keras.Model):
    """A mean of embeddings, with the lengths of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = keras.layers.Embedding(9, 4), keras.layers.Dense(1)

    def call(self, words: Any) -> Any:
        mask = tf.cast(tf.sequence_mask(words.row_lengths()), tf.float32)[..., None]
        vectors = self.embedding(words.to_tensor()) * mask
        return self.out(tf.reduce_sum(vectors, 1) / tf.reduce_sum(mask, 1))


def trained(scope: Any, is_built: bool) -> list[np.ndarray]:
    words = tf.RaggedTensor.from_row_lengths(WORDS, LENGTHS)
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    with scope:
        model = MeanOfWords()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        if is_built:
            model(words[:2])
    data = tf.data.Dataset.from_tensor_slices((words, Y)).batch(7)
    logs = model.fit(data, epochs=2, verbose=0).history
    return [*model.get_weights(), *map(np.asarray, logs.values()), model.predict(data, verbose=0)]


@pytest.mark.parametrize("is_built", (False, True))
def test_a_ragged_batch_trains_as_in_one_process(strategy: Any, is_built: bool) -> None:
    expected = trained(contextlib.nullcontext(), is_built)
    for one, other in zip(trained(strategy.scope(), is_built), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
