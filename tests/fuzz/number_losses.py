"""Losses that are no means over rows: sums, quotients, roots, rows that are compared with numbers of the batch.

And what a custom step does with gradients before `apply`. Nothing here knows of a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from fuzz.networks import like
from fuzz.programs import Program
from fuzz.training_steps import OwnStep


def _deviations(rows: Any) -> tuple[Any, Any]:
    """Returns the distance of each row from the mean, and the standard deviation."""
    return rows - ops.mean(rows), ops.sqrt(ops.var(rows) + 0.1)


def _quotient(y: Any, predicted: Any) -> Any:
    return ops.sum(ops.abs(y - predicted)) / (1.0 + ops.sum(ops.abs(y)))


def _standardized(y: Any, predicted: Any) -> Any:
    distances, deviation = _deviations(y)
    return ops.mean(ops.square(distances / deviation - predicted))


def _correlation(y: Any, predicted: Any) -> Any:
    (of_y, spread), (of_predicted, other_spread) = _deviations(y), _deviations(predicted)
    return -ops.mean(of_y * of_predicted) / (spread * other_spread)


def _chosen(y: Any, predicted: Any) -> Any:
    error = ops.mean(ops.square(y - predicted))
    return ops.cond(error > 0.7, lambda: 0.5 * error, lambda: ops.mean(ops.abs(y - predicted)))


def _valid(y: Any, predicted: Any) -> Any:
    return tf.math.divide_no_nan(
        ops.sum(ops.where(y > 0.0, ops.square(y - predicted), 0.0)), ops.sum(ops.cast(y > 0.0, predicted.dtype))
    )


def _selected(y: Any, predicted: Any) -> Any:
    kept = tf.boolean_mask(ops.square(y - predicted), y > 0.0)
    return tf.math.divide_no_nan(tf.reduce_sum(kept), ops.cast(tf.size(kept), predicted.dtype))


def _counted(y: Any, predicted: Any) -> Any:
    return ops.sum(ops.square(y - predicted)) / ops.cast(ops.shape(y)[0], predicted.dtype)


def _weighed(y: Any, predicted: Any) -> Any:
    weights = ops.exp(ops.abs(y))
    return ops.sum(weights / ops.sum(weights) * ops.square(y - predicted))


# Each makes a number of targets and predictions.
PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda y, predicted: ops.mean(ops.square(y - predicted)),
    "sum": lambda y, predicted: 0.1 * ops.sum(ops.square(y - predicted)),
    "quotient": _quotient,
    "root": lambda y, predicted: ops.sqrt(ops.mean(ops.square(y - predicted)) + 1e-3),
    "standardized": _standardized,
    "correlation": _correlation,
    "largest": lambda y, predicted: 0.1 * ops.max(ops.square(y - predicted)),
    "soft_largest": lambda y, predicted: 0.1 * tf.reduce_logsumexp(ops.abs(y - predicted)),
    "chosen": _chosen,
    "valid": _valid,
    "selected": _selected,
    "counted": _counted,
    "weighed": _weighed,
    "clipped": lambda y, predicted: ops.minimum(0.2 * ops.sum(ops.abs(y - predicted)), 1.0),
    "product": lambda y, predicted: ops.mean(ops.abs(y - predicted)) * (1.0 + ops.mean(predicted)),
}


def total(names: tuple[str, ...], y: Any, predicted: Any) -> Any:
    """Returns the sum of some parts."""
    y = like(y, predicted)
    return sum(PARTS[name](y, predicted) for name in names)


class _NumbersLoss(keras.losses.Loss):
    """An object whose `call` returns a number."""

    def __init__(self, names: tuple[str, ...]):
        super().__init__(reduction=None)
        self.names = names

    def call(self, y: Any, predicted: Any) -> Any:
        return total(self.names, y, predicted)


def compiled_loss(program: Program) -> Any:
    """Returns the loss for `compile`: a function or an object."""
    if program.loss == "numbers_class":
        return _NumbersLoss(program.numbers)
    return lambda y, predicted: total(program.numbers, y, predicted)


def _gated(gradients: list[Any], loss: Any) -> list[Any]:
    return [g * ops.cast(loss > 0.5, g.dtype) for g in gradients]


def _normalized(gradients: list[Any], loss: Any) -> list[Any]:
    return [g / (0.1 + tf.norm(g)) for g in gradients]


# Each returns other gradients, which may depend on the loss.
CHANGES: dict[str, Callable[[list[Any], Any], list[Any]]] = {
    "global_clip": lambda gradients, loss: tf.clip_by_global_norm(gradients, 0.3)[0],
    "clip": lambda gradients, loss: [ops.clip(g, -0.1, 0.1) for g in gradients],
    "clip_by_norm": lambda gradients, loss: [tf.clip_by_norm(g, 0.2) for g in gradients],
    "squashed": lambda gradients, loss: [ops.tanh(3.0 * g) for g in gradients],
    "normalized": _normalized,
    "gated": _gated,
    "scaled": lambda gradients, loss: [g * loss for g in gradients],
}


class Numbers(OwnStep):
    """A step whose loss is the sum of numbers."""

    names: tuple[str, ...] = ()
    change = ""

    def _loss_of(self, data: Any, training: bool) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = total(self.names, y, self(x, training=training))
        return loss + sum(self.losses) if self.losses else loss

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss_of(data, training=True)
        variables = self.trainable_variables
        pairs = [(g, v) for g, v in zip(tape.gradient(loss, variables), variables) if g is not None]
        self._apply_changed([tf.convert_to_tensor(g) for g, _ in pairs], [v for _, v in pairs], loss)
        return self._log(loss)

    def _apply_changed(self, gradients: list[Any], variables: list[Any], loss: Any) -> None:
        self.optimizer.apply(self._changed(gradients, loss), variables)

    def _changed(self, gradients: list[Any], loss: Any) -> list[Any]:
        return CHANGES[self.change](gradients, loss) if self.change else gradients


class _NumbersComputeLoss:
    """`compute_loss` with a sum of numbers."""

    names: tuple[str, ...] = ()

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = total(self.names, y, y_pred)
        return loss + sum(self.losses) if self.losses else loss


# Steps whose loss is that of the field `numbers` of a program.
STEPS: dict[str, type] = {"numbers": Numbers, "numbers_compute_loss": _NumbersComputeLoss}


def step_of(program: Program) -> type:
    """Returns a class with the step of a program, to mix in."""
    return type("OwnNumbers", (STEPS[program.step],), {"names": program.numbers, "change": program.change})
