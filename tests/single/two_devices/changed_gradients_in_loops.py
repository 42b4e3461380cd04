"""What a loop of the user's own makes of its gradients, of sequences and tables too (see `test_two_devices`)."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _gradient_changes import CHANGES, TARGETS, WORDS, Change, made
from _one_process import batches
from _own_steps import strategy

__all__ = ["strategy"]  # The fixture.

pytestmark = pytest.mark.tensorflow


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
