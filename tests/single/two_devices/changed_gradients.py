"""What a step makes of its gradients, of sequences and tables too, and in loops (see `test_two_devices`).

The first batches have a small loss, so that nothing is clipped in the step that is compared with one process.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _one_process import batches, require_equal
from _own_steps import strategy

__all__ = ["strategy"]  # The fixture.

pytestmark = pytest.mark.tensorflow

RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 9, (45, 3))
TARGETS = (RNG.normal(size=(45, 3, 1)) * np.where(np.arange(45) < 10, 0.02, 3.0)[:, None, None]).astype("float32")

Gradients = list[Any]
Change = Callable[[Gradients], Gradients]


def centred(gradient: Any) -> Any:
    return gradient - tf.reduce_mean(gradient, axis=0, keepdims=True)


CHANGES: dict[str, Change] = {
    "global norm": lambda gradients: tf.clip_by_global_norm(gradients, 1.0)[0],
    "global norm of dense ones": lambda gradients: tf.clip_by_global_norm([*map(tf.convert_to_tensor, gradients)], 1.0)[
        0
    ],
    "global norm, then dense": lambda gradients: [
        *map(tf.convert_to_tensor, tf.clip_by_global_norm(gradients, 1.0)[0])
    ],
    "global norm, then values, dense": lambda gradients: [
        tf.clip_by_value(tf.convert_to_tensor(one), -0.05, 0.05) for one in tf.clip_by_global_norm(gradients, 1.0)[0]
    ],
    "norms": lambda gradients: [tf.clip_by_norm(one, 0.3) for one in gradients],
    "values": lambda gradients: [tf.clip_by_value(one, -0.05, 0.05) for one in gradients],
    "skipped": lambda gradients: [
        tf.where(tf.linalg.global_norm(gradients) < 3.0, one, tf.zeros_like(one))
        for one in map(tf.convert_to_tensor, gradients)
    ],
    "centred": lambda gradients: [centred(tf.convert_to_tensor(one)) for one in gradients],
    "checked": lambda gradients: [tf.debugging.check_numerics(tf.convert_to_tensor(one), "") for one in gradients],
}


class Sequences(keras.Model):
    """A model of words whose step changes its gradients."""

    def __init__(self, change: Change, loss_of_each: bool = False):
        super().__init__()
        self.table, self.cells = keras.layers.Embedding(9, 4), keras.layers.GRU(4, return_sequences=True)
        self.dense, self.change, self.loss_of_each = keras.layers.Dense(1), change, loss_of_each

    def call(self, x: Any) -> Any:
        return self.dense(self.cells(self.table(x)))

    def gradients(self, x: Any, y: Any, loss_of: Callable[[Any], Any]) -> tuple[Gradients, Any]:
        with tf.GradientTape() as tape:
            loss = loss_of((self(x, training=True) - y) ** 2)
        return self.change(tape.gradient(loss, self.trainable_variables)), loss

    def train_step(self, data: Any) -> Any:
        x, y = data
        loss_of = (lambda e: tf.reduce_mean(e, axis=(1, 2))) if self.loss_of_each else tf.reduce_mean
        gradients, loss = self.gradients(x, y, loss_of)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": tf.reduce_mean(loss)}


def made(change: Change, **options: Any) -> Sequences:
    model = Sequences(change, **options)
    model(WORDS[:2])
    model.compile(keras.optimizers.SGD(0.1))
    return model


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


def _trained_in_a_loop(scope: Any, run: Any, distribute: Any, change: Change) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    with scope:
        model = made(change)

    def step(batch: Any) -> None:
        x, y = batch

        def loss_of(errors: Any) -> Any:
            return tf.nn.compute_average_loss(tf.reduce_mean(errors, axis=(1, 2)))

        gradients, _ = model.gradients(x, y, loss_of)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    function = tf.function(lambda batch: run(step, args=(batch,)))
    for batch in distribute(batches(WORDS, TARGETS)):
        function(batch)
    return [np.asarray(weight) for weight in model.trainable_variables]


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "checked"])
def test_in_a_loop(strategy: Any, name: str) -> None:
    alone = tf.distribute.get_strategy()
    expected = _trained_in_a_loop(contextlib.nullcontext(), alone.run, lambda data: data, CHANGES[name])
    distribute = strategy.experimental_distribute_dataset
    found = _trained_in_a_loop(strategy.scope(), strategy.run, distribute, CHANGES[name])
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=2e-5, atol=1e-6)


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


@pytest.mark.parametrize(("clips", "sums_first"), [(True, False), (True, True), (False, False)])
def test_clipped_gradients_that_a_loop_has_accumulated_are_told(strategy: Any, clips: bool, sums_first: bool) -> None:
    with strategy.scope():
        model = made(lambda gradients: [tf.convert_to_tensor(one) for one in gradients])
        kept = [tf.Variable(tf.zeros_like(one), trainable=False) for one in model.trainable_variables]
        model.optimizer.build(model.trainable_variables)

    def step(batch: Any) -> None:
        gradients, _ = model.gradients(
            *batch, lambda errors: tf.nn.compute_average_loss(tf.reduce_mean(errors, (1, 2)))
        )
        for sums, gradient in zip(kept, gradients):
            sums.assign_add(gradient)
        found = [tf.convert_to_tensor(sums) for sums in kept]
        if sums_first:
            found = tf.distribute.get_replica_context().all_reduce("SUM", found)
        found = tf.clip_by_global_norm(found, 1.0)[0] if clips else found
        model.optimizer.apply_gradients(
            zip([one / (2.0 if sums_first else 1.0) for one in found], model.trainable_variables)
        )

    function = tf.function(lambda batch: strategy.run(step, args=(batch,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in strategy.experimental_distribute_dataset(batches(WORDS, TARGETS)):
            function(batch)
    told = ["Here each replica changes its own" in str(one.message) for one in caught]
    assert any(told) == (clips and not sums_first)
