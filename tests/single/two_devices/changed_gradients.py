"""What a step makes of its gradients, of sequences and tables too (see `test_two_devices`).

The first batches have a small loss, so that nothing is clipped in the step that is compared with one process.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _gradient_changes import CHANGES, TARGETS, WORDS, Sequences, made
from _one_process import batches, require_equal
from _own_steps import strategy

__all__ = ["strategy"]  # The fixture.

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("name", CHANGES)
def test_in_fit(strategy: Any, name: str) -> None:
    require_equal(strategy, lambda: made(CHANGES[name]), batches(WORDS, TARGETS))


def test_of_losses_of_each_row(strategy: Any) -> None:
    # Their gradient is a sum over the rows.
    make = lambda: made(lambda gradients: tf.clip_by_global_norm(gradients, 2.0)[0], loss_of_each=True)  # noqa: E731
    require_equal(strategy, make, batches(WORDS, TARGETS))


class EverySecondStep(Sequences):
    """Changes its gradients in each step, and applies them in a branch."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        gradients, loss = self.gradients(x, y, tf.reduce_mean)

        def apply() -> Any:
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return self.optimizer.iterations + 1

        # Every second step, by a count that the branch does not write.
        tf.cond(self.count % 2 == 0, apply, lambda: tf.identity(self.optimizer.iterations))
        self.count.assign_add(1)
        return {"loss": loss}


@pytest.mark.parametrize("name", ["global norm", "values", "norms"])
def test_of_what_a_branch_applies(strategy: Any, name: str) -> None:
    def make() -> Sequences:
        model = EverySecondStep(CHANGES[name])
        model.count = model.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
        model(WORDS[:2])
        model.compile(keras.optimizers.SGD(0.1))
        model.optimizer.build(model.trainable_variables)
        return model

    require_equal(strategy, make, batches(WORDS, TARGETS))


def _rounded(gradient: Any) -> Any:
    rounded = tf.numpy_function(lambda g: np.round(g, 1), [gradient], gradient.dtype)
    return tf.ensure_shape(rounded, gradient.shape)


def test_what_cannot_be_read_is_told(strategy: Any) -> None:
    with strategy.scope():
        model = made(lambda gradients: [_rounded(tf.convert_to_tensor(one)) for one in gradients])
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(tf.errors.OpError, ValueError):
        warnings.simplefilter("always")
        model.fit(batches(WORDS, TARGETS), verbose=0)
    assert any("gradients = tfdistkit.global_gradients(gradients)" in str(one.message) for one in caught), caught
