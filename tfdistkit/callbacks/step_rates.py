"""Sets a learning rate that Python computes for every single training step.

With one step per execution the rate is assigned before each step. With `steps_per_execution` > 1 Keras calls no
callback between steps: the rates of all steps of an execution go into a table, from which each step reads its own.
The optimizer keeps its own variable for the rate, so checkpoints contain nothing of this.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain

# The rates that all learning-rate callbacks of a model in training share.
_OF_MODEL: weakref.WeakKeyDictionary[Any, StepRates] = weakref.WeakKeyDictionary()
# For an optimizer: the base rate that is multiplied, and the last rate that was set here.
_BASE_RATES: weakref.WeakKeyDictionary[Any, tuple[float, float]] = weakref.WeakKeyDictionary()


class StepRates:
    """Controls the learning rate of a model's optimizer step by step. Created by `attach`.

    Args:
        model: A compiled model whose training begins.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.optimizer = _innermost(model)
        self.steps = int(getattr(model, "steps_per_execution", 1))
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._execution: Any = None
        self._planned: list[tuple[float, bool] | None] = []
        with model.distribute_strategy.scope():
            self._schedule = _as_schedule(self.optimizer)
            self._factor = _variable(1.0) if self._schedule else None
            self._table = _variable(np.zeros([2, self.steps], np.float32))
            self._cursor = _variable(np.int32(self.steps))
        if self._schedule is not None:
            self.optimizer.learning_rate = _scaled(self._schedule, self._factor)
        self._own_train_step = vars(model).get("train_step")
        if self.steps > 1:
            model.train_step = self._before(model.train_step)
        if self.steps > 1 or self._schedule is not None:
            model.make_train_function(force=True)

    @property
    def rate(self) -> float:
        """The rate of the last step; with a schedule, the factor of the schedule."""
        value = self.optimizer.learning_rate if self._factor is None else self._factor
        return float(keras.ops.convert_to_numpy(value))

    @property
    def shown_rate(self) -> float:
        """The optimizer's rate, for the logs."""
        return float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))

    @property
    def has_schedule(self) -> bool:
        """Whether the optimizer has its own `LearningRateSchedule`, whose rates are multiplied."""
        return self._schedule is not None

    def base_rate(self) -> tuple[float, bool]:
        """Returns the rate before any of these callbacks changed it, and whether it is certain.

        It is uncertain for a restored optimizer, which may hold the rate of the step at which it was saved.
        """
        if self._schedule is not None:
            return 1.0, True
        base, last = _BASE_RATES.get(self.optimizer, (None, None))
        if base is not None and last == self.rate:
            return base, True
        return self.rate, self.steps_done() == 0

    def remember_base_rate(self, base: float) -> None:
        """Stores the result of `base_rate` for the next `fit`."""
        _BASE_RATES[self.optimizer] = (base, self.rate)

    def steps_done(self) -> int:
        """Returns the steps of the optimizer's life, including steps that only accumulate gradients."""
        counter = next((v for v in self.optimizer.variables if v.name == "iteration"), self.optimizer.iterations)
        return int(keras.ops.convert_to_numpy(counter))

    def plan(self, execution: tuple[int, int], rates: list[float | None], momentum_correction: bool) -> None:
        """Sets the rates of the steps of one execution.

        Args:
            execution: Epoch and first batch. Several callbacks may plan one execution; the last one wins.
            rates: One for each step; None keeps the rate of the step before, or of another callback.
            momentum_correction: Whether momentum is multiplied by `new / old` when the rate changes. Ignored with a
                schedule: it changes the rate in every step, and a restart does not know the previous factor.
        """
        if execution != self._execution:
            self._execution, self._planned = execution, [None] * self.steps
        for i, rate in enumerate(rates):
            self._planned[i] = (rate, momentum_correction) if rate is not None else self._planned[i]
        if self.steps == 1 and rates[0] is None:
            return
        old = self.rate
        table: np.ndarray = np.ones([2, self.steps], np.float32)
        for i, planned in enumerate(self._planned):
            new, correct = planned or (old, False)
            changes = np.float32(new) != np.float32(old) and old != 0
            table[:, i] = new, new / old if correct and changes and self._schedule is None else 1.0
            old = float(table[0, i])
        if self.steps == 1:
            self._set_rate(table[0, 0], table[1, 0])
        else:
            self._table.assign(table)
            self._cursor.assign(0)

    def release(self, user: Any) -> None:
        """Detaches one callback; the last one restores the model."""
        self.users.discard(user)
        if not self.users:
            self.restore()

    def restore(self) -> None:
        """Restores the model's own train step and schedule, and keeps the last rate."""
        if _OF_MODEL.get(self._model) is not self:
            return  # A later `fit` has restored it.
        del _OF_MODEL[self._model]
        if self._schedule is not None:
            self.optimizer.learning_rate = self._schedule
        if self.steps > 1:
            if self._own_train_step is None:
                del self._model.train_step
            else:
                self._model.train_step = self._own_train_step
        if self.steps > 1 or self._schedule is not None:
            self._model.make_train_function(force=True)

    def _before(self, train_step: Any) -> Any:
        @tf.autograph.experimental.do_not_convert
        def step_with_its_rate(data: Any) -> Any:
            self._pop_pending()
            return train_step(data)

        return step_with_its_rate

    def _pop_pending(self) -> None:
        """Sets the rate and the momentum correction of the next step of an execution, from the table."""
        index = self._cursor.read_value()
        row = tf.gather(self._table.read_value(), tf.minimum(index, self.steps - 1), axis=1)
        planned = index < self.steps  # False in a step that no callback has planned.
        current = self._factor.read_value() if self._factor is not None else self.optimizer.learning_rate
        rate = tf.where(planned, row[0], tf.cast(tf.convert_to_tensor(current), tf.float32))
        self._set_rate(rate, tf.where(planned, row[1], 1.0))
        self._cursor.assign_add(1)

    def _set_rate(self, rate: Any, correction: Any) -> None:
        if self._factor is not None:
            self._factor.assign(rate)
        else:
            self.optimizer.learning_rate = rate
        momentums = _momentums(self.optimizer)
        if not momentums or (not tf.is_tensor(correction) and correction == 1):
            return

        def correct() -> None:
            for momentum in momentums:
                momentum.assign(momentum * tf.cast(correction, momentum.dtype))

        if tf.is_tensor(correction):
            tf.cond(correction != 1, correct, lambda: None)
        else:
            correct()


def attach(user: Any, model: keras.Model) -> StepRates:
    """Attaches a callback to the rates of a model; the callback calls `release` when training ends."""
    rates = _OF_MODEL.get(model)
    if rates is not None and (rates.optimizer is not _innermost(model) or rates.steps != model.steps_per_execution):
        rates.restore()  # The model was recompiled after a `fit` that ended with an error.
        rates = None
    if rates is None:
        rates = _OF_MODEL[model] = StepRates(model)
    rates.users.add(user)
    return rates


def _innermost(model: keras.Model) -> Any:
    """Returns the optimizer that has the rate: the inner one of a LossScaleOptimizer."""
    optimizer: Any = getattr(model, "optimizer", None)
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if optimizer is None:
        raise UnsupportedError(
            explain(
                "A model must have an optimizer for a learning-rate callback.",
                received="model.optimizer=None",
                do="Pass it to `model.compile(...)`, or assign the rates in your own `train_step`.",
            )
        )
    return optimizer


def _as_schedule(optimizer: Any) -> Any:
    """Returns the optimizer's schedule; None if its rate is a variable."""
    kept = list(vars(optimizer).values())
    if any(one is optimizer.learning_rate for one in kept if isinstance(one, keras.Variable)):
        return None
    for one in kept:
        if isinstance(one, keras.optimizers.schedules.LearningRateSchedule):
            return one
    raise UnsupportedError(
        explain(
            "The optimizer must have a number or a `LearningRateSchedule` as its learning rate.",
            received=f"{type(optimizer).__name__}(learning_rate=<a function>)",
            do="Pass the optimizer a number, and the function to LearningRateScale(function, per='step').",
        )
    )


def _scaled(schedule: Any, factor: tf.Variable) -> Any:
    """Returns `schedule` times a variable; Keras saves it as `schedule`."""
    kind = type(schedule)

    class Scaled(kind):  # type: ignore[valid-type, misc]
        __class__ = property(lambda self: kind)  # Keras serializes this class.

        def __call__(self, step: Any) -> Any:
            return kind.__call__(self, step) * factor

    scaled: Any = object.__new__(Scaled)
    scaled.__dict__.update(schedule.__dict__)
    return scaled


def _momentums(optimizer: Any) -> list[Any]:
    """Returns the momentum slots of SGD and RMSprop, which contain the rates of past steps."""
    if not getattr(optimizer, "momentum", None):
        return []
    return [v for v in optimizer.variables if v.name.endswith("_momentum")]


def _variable(value: Any) -> tf.Variable:
    """Returns a variable whose copies the replicas update independently."""
    return tf.Variable(value, trainable=False, name="tfdistkit_rate")
