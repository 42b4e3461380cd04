"""The check of a first step: losses that are refused, and that pass (see `test_two_devices`)."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _own_steps import Loss, Own, X, Y, checks, compiled, each, fresh_session, strategy
from keras import ops

import tfdistkit
from tfdistkit.errors import UnsupportedError

__all__ = ["checks", "fresh_session", "strategy"]  # The fixtures.

pytestmark = pytest.mark.tensorflow

REFUSED: dict[str, Loss] = {
    "pairs": lambda x, y, p: ops.mean(ops.square(p[:, 0][:, None] - p[:, 0])),
    "contrastive": lambda x, y, p: ops.mean(ops.logsumexp(p @ ops.transpose(p), axis=1)),
    "softmax_of_rows": lambda x, y, p: ops.mean(ops.softmax(p, axis=0) * y),
    "in_a_branch": lambda x, y, p: tf.cond(ops.sum(x) < 1e9, lambda: ops.sum(each(y, p)), lambda: ops.mean(p)),
    "hardest": lambda x, y, p: tf.reduce_mean(tf.math.top_k(each(y, p), 3)[0]),
    "third_row": lambda x, y, p: ops.mean(each(y, p)) + (p[2, 0] - 1.0) ** 2,
    "hardest_part": lambda x, y, p: tf.reduce_mean(tf.math.top_k(each(y, p), tf.shape(p)[0] // 4)[0]),
    "sorted": lambda x, y, p: ops.mean(ops.sort(each(y, p))[:2]),
}


@pytest.mark.parametrize("loss", REFUSED.values(), ids=REFUSED)
def test_a_loss_that_no_graph_shows_is_refused_before_the_first_step(
    strategy: Any, checks: list[str], loss: Loss
) -> None:
    model = compiled(strategy, lambda: Own(loss))
    with pytest.raises(UnsupportedError, match=r"must have the gradients of one process.*\n.*check_step=False"):
        model.fit(X, Y, batch_size=13, verbose=0)
    assert checks == ["different"]
    assert int(model.optimizer.iterations) == 0


def test_operations_of_a_functional_model_that_combine_rows_are_refused(strategy: Any, checks: list[str]) -> None:
    def model() -> keras.Model:
        inputs = keras.Input(X.shape[1:])
        return keras.Model(inputs, keras.layers.Dense(Y.shape[1])(inputs / ops.max(ops.abs(inputs))))

    with strategy.scope():
        made = model()
        made.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(UnsupportedError, match="must have the gradients of one process"):
        made.fit(X, Y, batch_size=13, verbose=0)
    assert checks == ["different"]


def unit(p: Any) -> Any:
    return ops.normalize(p, axis=1)


def partners_of(y: Any) -> Any:
    return tf.random.uniform([tf.shape(y)[0]], 0, tf.shape(y)[0], tf.int32)


ACCEPTED: dict[str, Loss] = {
    "one_by_one": lambda x, y, p: ops.sum(
        tf.map_fn(lambda a: tf.reduce_sum(a[0] * tf.map_fn(tf.square, a[1])), (y, p), fn_output_signature=tf.float32)
    ),
    "variance": lambda x, y, p: ops.var(p),
    "mean": lambda x, y, p: ops.mean(each(y, p)),
    "of_rows": lambda x, y, p: each(y, p),
    "sum": lambda x, y, p: ops.sum(each(y, p)),
    "quotient": lambda x, y, p: ops.sum(each(y, p) * x[:, 0] ** 2) / ops.sum(x[:, 0] ** 2),
    "root": lambda x, y, p: ops.sqrt(ops.mean(each(y, p))),
    "of_keras": lambda x, y, p: keras.losses.MeanSquaredError(reduction="sum")(y, p),
    "gathered": lambda x, y, p: ops.var(tfdistkit.collectives.all_gather(p)),
    "random": lambda x, y, p: ops.mean(each(y + tf.random.normal(tf.shape(y)), p)),
    "minimum": lambda x, y, p: 2.0 - 2.0 * ops.mean(ops.sum(unit(p) * ops.stop_gradient(unit(p)), axis=1)),
    "partners": lambda x, y, p: ops.mean(each(0.7 * y + 0.3 * tf.gather(y, partners_of(y)), p)),
    "mixed": lambda x, y, p: ops.mean(each(tf.random.shuffle(y), p)),
}


# Their relatives are tested each time.
_THOROUGH = ("one_by_one", "mean", "of_rows", "root", "minimum", "mixed")


@pytest.mark.parametrize(
    "loss",
    [pytest.param(loss, marks=[pytest.mark.thorough] * (name in _THOROUGH)) for name, loss in ACCEPTED.items()],
    ids=ACCEPTED,
)
def test_exact_losses_pass(strategy: Any, checks: list[str], loss: Loss) -> None:
    compiled(strategy, lambda: Own(loss)).fit(X, Y, batch_size=5, verbose=0)
    assert checks == ["equal"]


class Scaled(Own):
    """Scales its loss for float16, as the guide of Keras for custom loops does."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.own_loss(*data, self(data[0], training=True))
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"own": loss}


def test_gradients_that_overflow_with_a_large_loss_scale_are_skipped(strategy: Any, checks: list[str]) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = functools.partial(keras.optimizers.LossScaleOptimizer, initial_scale=2.0**16)
        make = functools.partial(Scaled, lambda x, y, p: ops.mean(each(y, ops.cast(p, "float32"))), regularize=False)
        with strategy.scope():
            model = make()
            model.compile(optimizer(keras.optimizers.SGD(0.01)))
        model.fit(X, Y, batch_size=13, epochs=12, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    assert len(checks) == 1 and "overflow with this loss scale" in checks[0]
    assert float(model.optimizer.dynamic_scale) < 2.0**16 and int(model.optimizer.iterations) > 0


@pytest.mark.parametrize("loss", ("sum", "random"))
def test_the_check_changes_nothing(strategy: Any, checks: list[str], loss: str) -> None:
    def trained(check: bool) -> list[np.ndarray]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        tf.random.set_seed(5)
        model = compiled(strategy, lambda: Own(ACCEPTED[loss]))
        strategy.check_step = check
        try:
            model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
        finally:
            strategy.check_step = True
        return [*model.get_weights(), *(np.asarray(ops.convert_to_numpy(v)) for v in model.optimizer.variables)]

    for one, other in zip(trained(True), trained(False), strict=True):
        np.testing.assert_array_equal(one, other)
    assert checks == ["equal"]


def test_rows_that_hide_a_median_are_tried_in_another_order(strategy: Any, checks: list[str]) -> None:
    """The three smallest errors of rows 0 to 5 are also the smallest halves of rows 0 to 3, and of 4 and 5."""

    def below_median(x: Any, y: Any, p: Any) -> Any:
        errors = ops.abs(y - p)[:, 0]
        return ops.mean(ops.minimum(errors, ops.stop_gradient(ops.median(errors))))

    model = compiled(strategy, lambda: Own(below_median, regularize=False))
    model.build((None, 6))
    model.set_weights([np.zeros_like(one) if one.shape[-1] == 2 else one for one in model.get_weights()])
    errors = np.array([1, 2, 10, 11, 3, 12, 13, 14], "float32")
    with pytest.raises(UnsupportedError, match="must have the gradients of one process"):
        model.fit(X[:8], np.stack([errors, errors], 1), batch_size=8, shuffle=False, verbose=0)
    assert checks == ["different"]
