"""Custom steps: overrides of `compute_loss` and `train_step`, each a mixin for a model.

All of them compute means over the rows of the batch they see. Nothing here knows of a strategy.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from fuzz.networks import mean_of_squares


class OwnStep:
    """The base of the custom steps: a custom loss, also for `evaluate`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.own_loss = keras.metrics.Mean(name="own_loss")

    def _loss_of(self, data: Any, training: bool) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = mean_of_squares(y, self(x, training=training))
        return loss + sum(self.losses) if self.losses else loss

    def _log(self, loss: Any) -> Any:
        self.own_loss.update_state(loss)
        return {"own_loss": self.own_loss.result()}

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss_of(data, training=True)
        self._apply(tape.gradient(loss, self.trainable_variables))
        return self._log(loss)

    def _apply(self, gradients: Any) -> None:
        self.optimizer.apply(gradients, self.trainable_variables)

    def test_step(self, data: Any) -> Any:
        return self._log(self._loss_of(data, training=False))


class MeanStep(OwnStep):
    """`ops.mean(...)`, `tape.gradient`, `apply`, a tracker."""


class ApplyGradientsStep(OwnStep):
    """With the older name of `apply`."""

    def _apply(self, gradients: Any) -> None:
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))


class BareStep(OwnStep):
    """Returns its loss without a tracker."""

    def _log(self, loss: Any) -> Any:
        return {"loss": loss}


class BareLogsStep(OwnStep):
    """Returns its loss and more numbers without a tracker, one of them constant."""

    def _log(self, loss: Any) -> Any:
        return {"loss": loss, "twice": 2.0 * loss, "one": ops.ones(())}


class TwiceTrackedStep(OwnStep):
    """A tracker that counts rows by itself, beside the loss itself."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return {**logs, "squares": ops.square(logs["own_loss"])}


class WeightedTrackerStep(OwnStep):
    """A tracker that receives the number of rows of its value."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self._loss_of(data, training=True)
        self._apply(tape.gradient(loss, self.trainable_variables))
        rows = ops.shape(tf.nest.flatten(data)[0])[0]
        self.own_loss.update_state(loss, sample_weight=ops.cast(rows, loss.dtype))
        return {"own_loss": self.own_loss.result()}


class PersistentStep(OwnStep):
    """Two losses by one tape, whose gradients are added."""

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            predicted = self(x, training=True)
            first, second = mean_of_squares(y, predicted), 0.1 * ops.mean(ops.abs(predicted))
        parts = [tape.gradient(loss, self.trainable_variables) for loss in (first, second)]
        parts = [[None if g is None else tf.convert_to_tensor(g) for g in part] for part in parts]
        self._apply([b if a is None else a if b is None else a + b for a, b in zip(*parts)])
        return self._log(first + second)


class AccumulatingStep(OwnStep):
    """Accumulates gradients in its own variables, and applies their mean every second step."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self._make_sums()

    def _make_sums(self) -> None:
        if not hasattr(self, "sums"):
            self.sums = [
                self.add_weight(shape=v.shape, initializer="zeros", trainable=False, name=f"sum{i}")
                for i, v in enumerate(self.trainable_variables)
            ]
            self.seen = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="seen")

    def _apply(self, gradients: Any) -> None:
        for total, gradient in zip(self.sums, gradients):
            if gradient is not None:
                total.assign_add(0.5 * tf.convert_to_tensor(gradient))
        self.seen.assign_add(1)

        def apply() -> None:
            self.optimizer.apply([tf.convert_to_tensor(total) for total in self.sums], self.trainable_variables)
            for total in self.sums:
                total.assign(ops.zeros_like(total))

        tf.cond(tf.equal(tf.convert_to_tensor(self.seen) % 2, 0), apply, lambda: None)


class TwoOptimizersStep(OwnStep):
    """One optimizer for the first half of the variables, another for the rest."""

    def compile(self, *args: Any, **options: Any) -> None:
        super().compile(*args, **options)
        self.other_optimizer = keras.optimizers.Adam(0.01)

    def _apply(self, gradients: Any) -> None:
        variables = self.trainable_variables
        half = len(variables) // 2
        self.other_optimizer.apply(gradients[:half], variables[:half])
        self.optimizer.apply(gradients[half:], variables[half:])


class GuideStep:
    """The custom training step of the Keras guide: the compiled loss and metrics."""

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=weight)
        return {metric.name: metric.result() for metric in self.metrics}


class ScaledStep:
    """As Keras's own step: `optimizer.scale_loss`, `compute_metrics`."""

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return self.compute_metrics(x, y, predicted, sample_weight=weight)


class OwnComputeLoss:
    """`compute_loss` with a custom mean."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = mean_of_squares(y, y_pred)
        return loss + sum(self.losses) if self.losses else loss


class MoreComputeLoss:
    """`compute_loss` that adds a term to Keras's."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        return loss + 0.1 * ops.mean(ops.abs(y_pred))


class OwnTestStep(OwnStep):
    """Keras's step in training, a custom one in `evaluate`."""

    def train_step(self, data: Any) -> Any:
        return keras.Model.train_step(self, data)


# Steps with their own loss need targets of one output; the others accept all targets of `compile`.
OWN_LOSS: dict[str, type] = {
    "mean": MeanStep,
    "apply_gradients": ApplyGradientsStep,
    "bare": BareStep,
    "bare_logs": BareLogsStep,
    "twice_tracked": TwiceTrackedStep,
    "weighted_tracker": WeightedTrackerStep,
    "persistent": PersistentStep,
    "accumulating": AccumulatingStep,
    "two_optimizers": TwoOptimizersStep,
    "own_compute_loss": OwnComputeLoss,
    "own_test_step": OwnTestStep,
}
COMPILED: dict[str, type] = {"guide": GuideStep, "scaled": ScaledStep, "more_compute_loss": MoreComputeLoss}
STEPS: dict[str, type] = {"keras": object, **OWN_LOSS, **COMPILED}
