"""Losses, metrics and optimizers, Keras's and custom ones, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
from keras import losses, metrics, ops, optimizers

from fuzz import number_losses
from fuzz.networks import like as _like
from fuzz.programs import Program


def own_rows(y: Any, predicted: Any) -> Any:
    """A loss or metric that returns a number for each row (or token)."""
    return ops.mean(ops.abs(_like(y, predicted) - predicted) ** 1.5, axis=-1)


def own_scalar(y: Any, predicted: Any) -> Any:
    """A loss or metric that averages the batch itself."""
    return ops.mean(ops.square(_like(y, predicted) - predicted) + 0.1 * predicted)


class OwnLoss(losses.Loss):
    """A loss that returns a number for each row."""

    def call(self, y: Any, predicted: Any) -> Any:
        return ops.mean(ops.square(_like(y, predicted) - predicted), axis=-1)


class OwnScalarLoss(losses.Loss):
    """A loss that averages the batch itself."""

    def call(self, y: Any, predicted: Any) -> Any:
        return ops.mean(ops.square(_like(y, predicted) - predicted))


def _keras(kind: type) -> Any:
    return lambda reduction: kind(**({"reduction": None if reduction == "none" else reduction} if reduction else {}))


# Each makes a loss with a given reduction; custom functions have none.
LOSSES: dict[str, Any] = {
    "mse": _keras(losses.MeanSquaredError),
    "mae": _keras(losses.MeanAbsoluteError),
    "huber": _keras(losses.Huber),
    "log_cosh": _keras(losses.LogCosh),
    "binary": _keras(losses.BinaryCrossentropy),
    "focal": _keras(losses.BinaryFocalCrossentropy),
    "hinge": _keras(losses.Hinge),
    "sparse": _keras(losses.SparseCategoricalCrossentropy),
    "own_rows": lambda reduction: own_rows,
    "own_scalar": lambda reduction: own_scalar,
    "own_class": _keras(OwnLoss),
    "own_scalar_class": _keras(OwnScalarLoss),
    "lambda": lambda reduction: lambda y, predicted: ops.mean(ops.abs(_like(y, predicted) - predicted)),
}
FUNCTIONS = ("own_rows", "own_scalar", "lambda")
NUMBER_LOSSES = ("mse", "own_scalar", "own_rows", "mae", "huber", "log_cosh", "own_class", "own_scalar_class", "lambda")
LOSSES_OF_TARGETS = {
    "number": NUMBER_LOSSES,
    "flat": NUMBER_LOSSES,
    "tokens": NUMBER_LOSSES,
    "two": ("mse", "own_rows", "mae", "huber", "own_scalar", "own_class"),
    "yes_no": ("binary", "focal", "hinge", "own_rows", "own_scalar", "own_class", "mse"),
    "class": ("sparse",),
    "none": ("",),
}


class _Extreme(metrics.Metric):
    """The largest or smallest error of any row."""

    start, pick = 0.0, staticmethod(ops.maximum)

    def __init__(self, name: str, **options: Any):
        super().__init__(name=name, **options)
        start = self.start
        self.extreme = self.add_weight(name="extreme", initializer=keras.initializers.Constant(start))

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        errors = ops.abs(_like(y, predicted) - predicted)
        self.extreme.assign(self.pick(self.extreme, getattr(ops, "max" if self.start == 0.0 else "min")(errors)))

    def reset_state(self) -> None:
        self.extreme.assign(self.start)  # Keras's own sets 0, but not before the first epoch.

    def result(self) -> Any:
        return self.extreme * 1.0


class OwnMax(_Extreme):
    """The largest error of any row."""


class OwnMin(_Extreme):
    """The smallest error of any row."""

    start, pick = 100.0, staticmethod(ops.minimum)


class OwnSum(metrics.Metric):
    """The sum of the errors; `result()` returns the variable, as the example in Keras's documentation does."""

    def __init__(self, name: str, **options: Any):
        super().__init__(name=name, **options)
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum(ops.abs(_like(y, predicted) - predicted)))

    def result(self) -> Any:
        return self.total


class OwnMean(metrics.Metric):
    """A mean from two variables, with sample weights."""

    def __init__(self, name: str, **options: Any):
        super().__init__(name=name, **options)
        self.total = self.add_weight(name="total", shape=(), initializer="zeros")
        self.count = self.add_weight(name="count", shape=(), initializer="zeros")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        error = ops.square(_like(y, predicted) - predicted)
        error = ops.mean(ops.reshape(error, (ops.shape(error)[0], -1)), axis=-1)
        weight = ops.ones_like(error)
        if sample_weight is not None:
            weight = ops.cast(ops.reshape(sample_weight, (ops.shape(error)[0], -1))[:, 0], error.dtype)
        self.total.assign(self.total + ops.sum(error * weight))
        self.count.assign(self.count + ops.sum(weight))

    def result(self) -> Any:
        return self.total / ops.maximum(self.count, 1e-7)


class OwnMoving(metrics.Metric):
    """A moving average of the batches' means, which is not additive over replicas."""

    def __init__(self, name: str, **options: Any):
        super().__init__(name=name, **options)
        self.mean = self.add_weight(name="mean", shape=(), initializer="zeros")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.mean.assign(0.5 * self.mean + 0.5 * ops.mean(_like(y, predicted) - predicted))

    def result(self) -> Any:
        return ops.sqrt(ops.square(self.mean) + 1.0)


METRICS: dict[str, Any] = {
    "mae": lambda: metrics.MeanAbsoluteError(name="mae"),
    "rmse": lambda: metrics.RootMeanSquaredError(name="rmse"),
    "cosine": lambda: metrics.CosineSimilarity(name="cosine"),
    "r2": lambda: metrics.R2Score(name="r2"),
    "accuracy": lambda: "accuracy",
    "auc": lambda: metrics.AUC(name="auc", num_thresholds=20),
    "precision": lambda: metrics.Precision(name="precision"),
    "top2": lambda: metrics.SparseTopKCategoricalAccuracy(k=2, name="top2"),
    "own_rows": lambda: own_rows,
    "own_scalar": lambda: own_scalar,
    "own_max": lambda: OwnMax("own_max"),
    "own_min": lambda: OwnMin("own_min"),
    "own_sum": lambda: OwnSum("own_sum"),
    "own_mean": lambda: OwnMean("own_mean"),
    "own_moving": lambda: OwnMoving("own_moving"),
}
_OWN = ("own_rows", "own_scalar", "own_max", "own_min", "own_sum", "own_mean", "own_moving")
METRICS_OF_TARGETS = {
    "number": ("mae", "rmse", "r2", *_OWN),
    "flat": ("mae", "rmse", *_OWN),
    "tokens": ("mae", "rmse", *_OWN),
    "two": ("mae", "rmse", "cosine", "own_rows", "own_scalar", "own_max", "own_sum"),
    "yes_no": ("accuracy", "auc", "precision", *_OWN),
    "class": ("accuracy", "top2"),
    "none": (),
}

OPTIMIZERS: dict[str, Any] = {
    "sgd": (optimizers.SGD, 0.05, {}),
    "momentum": (optimizers.SGD, 0.03, {"momentum": 0.9}),
    "nesterov": (optimizers.SGD, 0.03, {"momentum": 0.8, "nesterov": True}),
    "adam": (optimizers.Adam, 0.01, {}),
    "adamw": (optimizers.AdamW, 0.01, {"weight_decay": 0.1}),
    "amsgrad": (optimizers.Adam, 0.01, {"amsgrad": True}),
    "rmsprop": (optimizers.RMSprop, 0.01, {"centered": True}),
    "adagrad": (optimizers.Adagrad, 0.05, {}),
    "adamax": (optimizers.Adamax, 0.01, {}),
    "nadam": (optimizers.Nadam, 0.01, {}),
    "ftrl": (optimizers.Ftrl, 0.05, {}),
}
_CLIPS = {"clipnorm": 0.1, "global_clipnorm": 0.2, "clipvalue": 0.05}


def make_optimizer(program: Program) -> Any:
    """Makes the optimizer of a program."""
    kind, rate, options = OPTIMIZERS[program.optimizer]
    options = dict(options)
    if program.clip:
        options[program.clip] = _CLIPS[program.clip]
    if program.accumulation:
        options["gradient_accumulation_steps"] = program.accumulation
    if program.ema:
        options.update(use_ema=True, ema_momentum=0.9)
        options["ema_overwrite_frequency"] = 2 if program.ema == "overwrite" else None
    if program.schedule:
        rate = optimizers.schedules.ExponentialDecay(rate, 2, 0.7)
    found = kind(rate, **options)
    return optimizers.LossScaleOptimizer(found, dynamic_growth_steps=3) if program.loss_scale else found


def compile_arguments(program: Program) -> dict[str, Any]:
    """Returns the arguments of `compile` for a program without a custom step."""
    two = program.targets == "two"
    loss: Any = LOSSES[program.loss](program.reduction) if program.loss in LOSSES else None
    loss = number_losses.compiled_loss(program) if program.numbers else loss
    names: Any = [METRICS[name]() for name in program.metrics]
    if two:
        loss = {"one": loss, "two": LOSSES[program.loss](program.reduction)}
        names = {"one": names, "two": [METRICS[name]() for name in program.metrics[:1]]}
    arguments = {
        "optimizer": make_optimizer(program),
        "loss": loss,
        "weighted_metrics" if program.weighted_metrics else "metrics": names or None,
        "steps_per_execution": program.execution,
        "run_eagerly": program.eager,
        "jit_compile": False,
    }
    if two and program.loss_weights:
        arguments["loss_weights"] = {"one": 0.7, "two": 2.0}
    return arguments
