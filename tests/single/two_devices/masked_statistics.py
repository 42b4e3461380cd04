"""The statistics of `BatchNormalization(synchronized=True)` over masked inputs (see `test_two_devices`)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdistkit

pytestmark = pytest.mark.tensorflow

WORDS = np.random.default_rng(0).integers(0, 9, (30, 5))
CLASSES = np.random.default_rng(1).integers(0, 3, 30)


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


def _trained(scope: Any, words: np.ndarray) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    with scope:
        model = keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                layers.Embedding(9, 4, mask_zero=True),
                layers.BatchNormalization(synchronized=True, momentum=0.5),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=False)
    model.fit(words, CLASSES, batch_size=7, epochs=2, shuffle=False, verbose=0)
    return [np.asarray(one) for one in model.get_weights()]


@pytest.mark.parametrize("words", (WORDS, WORDS + (WORDS == 0)), ids=("masked", "no word is masked"))
def test_masked_statistics_are_those_of_all_replicas(strategy: Any, words: np.ndarray) -> None:
    expected = _trained(tf.distribute.get_strategy().scope(), words)
    for one, other in zip(_trained(strategy.scope(), words), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
