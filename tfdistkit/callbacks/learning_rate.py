"""`LearningRateWarmup` and `LearningRateScale`: learning rates for the number of replicas."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import keras

from tfdistkit.callbacks.chief import writes_files
from tfdistkit.callbacks.process_group import warn_once
from tfdistkit.callbacks.step_rates import StepRates, attach
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.validation import require_choice, require_integer, require_positive

_SCALES: dict[str, Callable[[int], float]] = {"linear": float, "sqrt": math.sqrt}


class _LearningRate(keras.callbacks.Callback):
    """Base class: sets the rate of each step to a multiple of the initial rate; None keeps the rate."""

    def __init__(
        self,
        initial_learning_rate: float | None,
        momentum_correction: bool,
        steps_per_epoch: int | None,
        verbose: int,
    ):
        super().__init__()
        _require_positive_or_none("initial_learning_rate", initial_learning_rate)
        if steps_per_epoch is not None:
            require_integer("steps_per_epoch", steps_per_epoch)
        self.initial_learning_rate = initial_learning_rate
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.verbose = verbose
        self._rates: StepRates | None = None
        self._base: float | None = None
        self._replicas = 1
        self._steps = self._epoch = self._first_step = 0

    def _multiplier_at(self, epoch: int, batch: int, step: int) -> float | None:
        raise NotImplementedError

    def _needs_steps_per_epoch(self) -> bool:
        raise NotImplementedError

    def _changed_before(self, epoch: int, step: int) -> bool:
        """Returns whether an optimizer saved before `epoch` and `step` holds a rate set by this callback."""
        raise NotImplementedError

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Reads the optimizer and the number of replicas."""
        if self._rates is not None:
            self._rates.release(self)  # An earlier `fit` ended with an error.
        self._base = None
        self._replicas = self.model.distribute_strategy.num_replicas_in_sync
        self._steps = self.steps_per_epoch or (self.params or {}).get("steps") or 0
        if not self._steps and self._needs_steps_per_epoch():
            raise UnsupportedError(
                explain(
                    f"{type(self).__name__} must know the number of steps of an epoch.",
                    received="data without a length",
                    do=f"Pass it: {type(self).__name__}(..., steps_per_epoch=...).",
                )
            )
        self._rates = attach(self, self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Finds the first step of the epoch."""
        assert self._rates is not None
        done = self._rates.steps_done()
        self._first_step = done if done else epoch * self._steps
        self._epoch = epoch
        if self._base is None:
            self._base = self._find_base()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rates of the steps until the next call."""
        assert self._rates is not None and self._base is not None
        rates = []
        for ahead in range(self._rates.steps):
            multiplier = self._multiplier_at(self._epoch, batch + ahead, self._first_step + batch + ahead)
            rates.append(None if multiplier is None else self._base * multiplier)
        self._rates.plan((self._epoch, batch), rates, self.momentum_correction)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate of the last step to the logs, as `learning_rate`."""
        assert self._rates is not None and self._base is not None
        self._rates.remember_base_rate(self._base)
        if logs is not None:
            logs["learning_rate"] = self._rates.shown_rate

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Leaves the optimizer with its last rate."""
        assert self._rates is not None
        if self._base is not None:
            self._rates.remember_base_rate(self._base)
        self._rates.release(self)
        self._rates = None

    def _find_base(self) -> float:
        assert self._rates is not None
        name = type(self).__name__
        if self.initial_learning_rate is not None:
            if self._rates.has_schedule:
                raise UnsupportedError(
                    explain(
                        "`initial_learning_rate` must be None: the optimizer's schedule is multiplied.",
                        received=f"initial_learning_rate={self.initial_learning_rate}",
                        do=f"Leave `initial_learning_rate` out of {name}.",
                    )
                )
            return self.initial_learning_rate
        base, sure = self._rates.base_rate()
        if not sure and self._changed_before(self._epoch, self._first_step):
            raise UnsupportedError(
                explain(
                    f"{name} must know the initial learning rate: the optimizer comes from a checkpoint, which may "
                    "hold a rate that this callback had set.",
                    received=f"a rate of {base:g} after {self._rates.steps_done()} steps, in epoch {self._epoch + 1}",
                    do=f"Pass the rate that the optimizer was created with: {name}(..., initial_learning_rate=...).",
                )
            )
        return base


class LearningRateWarmup(_LearningRate):
    """Raises the learning rate linearly, step by step, from the rate of one replica to the scaled rate.

    A rate that was scaled up for N replicas (with a global batch N times as large) is too high at first.
    The warm-up starts at `rate / f`, ends at `rate`, and then leaves the rate unchanged. `f` is the factor by
    which the rate was scaled: N, the square root of N, or a function of N. In each step the rate is
    `rate / f * (e * (f - 1) / warmup_epochs + 1)`, where `e` counts epochs in fractions and equals
    `warmup_epochs` in the last step of the warm-up (Goyal et al., 2017, https://arxiv.org/abs/1706.02677).

    The rate is right for every step with `steps_per_execution` > 1 too, and continues after a restart
    with `initial_epoch` (with `warmup_steps`: with a restored optimizer). If the optimizer has a
    `LearningRateSchedule`, the schedule's rates are multiplied. With one replica it does nothing, and logs that
    once. Put it on every rank.

    Args:
        initial_learning_rate: The rate at the end of the warm-up. Default: the optimizer's rate. Required when
            training restarts within the warm-up: a restored optimizer holds the rate that it was saved with.
        warmup_epochs: Length of the warm-up in epochs.
        momentum_correction: Whether momentum (SGD, RMSprop) is multiplied by `new / old` when the rate
            changes, so that past steps keep their weight. Has no effect with a `LearningRateSchedule` in the
            optimizer, which changes the rate in every step.
        steps_per_epoch: Steps per epoch, for data without a length.
        verbose: 1 prints a line on the chief when the warm-up ends.
        warmup_steps: Length of the warm-up in optimizer steps (batches), instead of `warmup_epochs`.
        scale: `"linear"`, `"sqrt"`, or a function from N to the factor.

    Raises:
        OptionError: (a ValueError) if an argument is invalid.
        UnsupportedError: (a RuntimeError) in training, if the initial rate or the steps of an epoch are unknown,
            or the model has no optimizer whose rate can be set.

    Example:
        ```python
        strategy = tfdistkit.strategy("multiworker")
        replicas = strategy.num_replicas_in_sync
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1 * replicas, momentum=0.9), "mse")
        model.fit(dataset.batch(64 * replicas), epochs=90, callbacks=[tfdistkit.callbacks.LearningRateWarmup()])
        ```
    """

    def __init__(
        self,
        initial_learning_rate: float | None = None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
        *,
        warmup_steps: int | None = None,
        scale: str | Callable[[int], float] = "linear",
    ):
        super().__init__(initial_learning_rate, momentum_correction, steps_per_epoch, verbose)
        _require_positive_or_none("warmup_epochs", warmup_epochs)
        _require_positive_or_none("warmup_steps", warmup_steps)
        self.warmup_epochs = warmup_epochs
        self.warmup_steps = warmup_steps
        self._factor_of = _scale(scale)
        self._factor = 1.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Computes the factor by which the rate was scaled."""
        super().on_train_begin(logs)
        self._factor = require_positive("scale", float(self._factor_of(self._replicas)))
        if self._factor == 1:
            warn_once("LearningRateWarmup has nothing to do: with one replica the rate is not scaled.")

    def _done(self, epoch: int, batch: int, step: int) -> float:
        """Returns the fraction of the warm-up that is done before a step."""
        if self.warmup_steps is not None:
            return step / self.warmup_steps
        return (epoch + batch / self._steps) / self.warmup_epochs

    def _multiplier_at(self, epoch: int, batch: int, step: int) -> float | None:
        if self._factor == 1 or self._done(epoch, batch, step) >= 1:
            return None
        return (min(1.0, self._done(epoch, batch + 1, step + 1)) * (self._factor - 1) + 1) / self._factor

    def _needs_steps_per_epoch(self) -> bool:
        return self.warmup_steps is None

    def _changed_before(self, epoch: int, step: int) -> bool:
        return self._factor != 1 and 0 < self._done(epoch, 0, step) < 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate to the logs, and prints a line when the warm-up has ended."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and self._rates is not None and self._factor != 1 and writes_files(self.model):
            last = self._rates.steps_done()
            before = self._done(epoch, 0, self._first_step)
            if before < 1 <= self._done(epoch + 1, 0, last):
                print(f"Epoch {epoch + 1}: finished gradual learning rate warmup to {self._rates.shown_rate:g}.")


class LearningRateScale(_LearningRate):
    """Multiplies the initial learning rate over a range of epochs.

    `rate = initial rate * multiplier`. Combine several, each with its own range, and `LearningRateWarmup` into a
    schedule. As with `LearningRateWarmup`, the rate is right for every step with `steps_per_execution` > 1 and
    after a restart, and the rates of a `LearningRateSchedule` are multiplied. Put it on every rank.

    Args:
        multiplier: A number; `"linear"` or `"sqrt"` for the number of replicas or its square root; or a
            function of the epoch (from 0), or of the optimizer's step with `per="step"`. A
            `LearningRateSchedule` is a function of the step.
        start_epoch: The first epoch of the range.
        end_epoch: The first epoch after the range. Default: no end.
        staircase: Whether the function is called once per epoch; else before every step, with epochs in
            fractions.
        momentum_correction: Whether momentum (SGD, RMSprop) is multiplied by `new / old` when the rate
            changes, so that past steps keep their weight. Has no effect with a `LearningRateSchedule` in the
            optimizer, which changes the rate in every step.
        steps_per_epoch: Steps per epoch, for data without a length.
        initial_learning_rate: The rate that is multiplied. Default: the optimizer's rate. Required after a restart
            within or after the range: a restored optimizer holds the rate that it was saved with.
        per: The argument of the function: `"epoch"` or `"step"`.
        verbose: 1 prints the rate of every epoch of the range, on the chief.

    Raises:
        OptionError: (a ValueError) if an argument is invalid.
        UnsupportedError: (a RuntimeError) in training, as `LearningRateWarmup`.

    Example:
        ```python
        callbacks = [
            tfdistkit.callbacks.LearningRateWarmup(warmup_epochs=5),
            tfdistkit.callbacks.LearningRateScale(0.1, start_epoch=30, end_epoch=60),
            tfdistkit.callbacks.LearningRateScale(0.01, start_epoch=60),
        ]
        ```
    """

    def __init__(
        self,
        multiplier: float | str | Callable[[Any], Any],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        initial_learning_rate: float | None = None,
        *,
        per: str = "epoch",
        verbose: int = 0,
    ):
        super().__init__(initial_learning_rate, momentum_correction, steps_per_epoch, verbose)
        require_choice("per", per, ("epoch", "step"))
        self.multiplier = multiplier
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self._scale_of = _SCALES.get(multiplier) if isinstance(multiplier, str) else None
        given: Any = multiplier
        self._is_number = isinstance(given, numbers.Real) and not isinstance(given, bool)
        is_negative = self._is_number and not 0 <= given < math.inf
        if is_negative or not (self._is_number or callable(multiplier) or self._scale_of):
            raise OptionError(
                explain(
                    '`multiplier` must be a number >= 0, "linear", "sqrt" or a function.',
                    received=f"multiplier={multiplier!r}",
                )
            )
        is_schedule = isinstance(multiplier, keras.optimizers.schedules.LearningRateSchedule)
        self.staircase = staircase or self._is_number or self._scale_of is not None
        self.per = "step" if is_schedule else per

    def _multiplier_at(self, epoch: int, batch: int, step: int) -> float | None:
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return None
        every_step = self.per == "step" or not self.staircase
        if batch and (not every_step or self._is_number or self._scale_of):
            return None
        if self._scale_of is not None:
            return self._scale_of(self._replicas)
        if self._is_number:
            return float(self.multiplier)  # type: ignore[arg-type]
        position: float = epoch
        if self.per == "step":
            position = step
        elif not self.staircase:
            position = epoch + batch / self._steps
        return float(keras.ops.convert_to_numpy(self.multiplier(position)))  # type: ignore[operator]

    def _needs_steps_per_epoch(self) -> bool:
        return self.per == "epoch" and not self.staircase

    def _changed_before(self, epoch: int, step: int) -> bool:
        return epoch > self.start_epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the rate to the logs."""
        super().on_epoch_end(epoch, logs)
        in_range = self.start_epoch <= epoch and (self.end_epoch is None or epoch < self.end_epoch)
        if self.verbose and in_range and self._rates is not None and writes_files(self.model):
            print(f"Epoch {epoch + 1}: learning rate {self._rates.shown_rate:g}.")


def _scale(scale: Any) -> Callable[[int], float]:
    if isinstance(scale, str) and scale in _SCALES:
        return _SCALES[scale]
    if callable(scale):
        return scale
    raise OptionError(
        explain(
            '`scale` must be "linear", "sqrt", or a function of the number of replicas.',
            received=f"scale={scale!r}",
        )
    )


def _require_positive_or_none(name: str, value: Any) -> None:
    if value is not None:
        require_positive(name, value)
