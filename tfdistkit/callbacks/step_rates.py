"""How learning rates that Python computes reach every single step of a model's training.

With one step an execution the rate is assigned before each step. With `steps_per_execution` > 1 callbacks
are not called in between: there the rates of all steps of an execution go into a table, and each step takes
its own out of it. The optimizer keeps its own variable for the rate, so a checkpoint that is written
meanwhile holds nothing of this.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain

# Of a model that is being trained with callbacks for its rate: what they share.
_OF_MODEL: weakref.WeakKeyDictionary[Any, StepRates] = weakref.WeakKeyDictionary()
# Of an optimizer: the rate that ours are multiples of, and the last one that was set here.
_BASE_RATES: weakref.WeakKeyDictionary[Any, tuple[float, float]] = weakref.WeakKeyDictionary()


class StepRates:
    """The learning rate of a model's optimizer, step by step. Made by `attach`.

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
        """The rate of the last step; for an optimizer with a schedule what the schedule is multiplied by."""
        value = self.optimizer.learning_rate if self._factor is None else self._factor
        return float(keras.ops.convert_to_numpy(value))

    @property
    def shown_rate(self) -> float:
        """The rate as a log shows it."""
        return float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))

    @property
    def has_schedule(self) -> bool:
        """Whether the optimizer has a `LearningRateSchedule` of its own, which is multiplied."""
        return self._schedule is not None

    def base_rate(self) -> tuple[float, bool]:
        """Returns the rate before any callback of ours changed it, and whether that is known for sure.

        It is not when a restored optimizer may hold the rate of the step that it was saved at.
        """
        if self._schedule is not None:
            return 1.0, True
        base, last = _BASE_RATES.get(self.optimizer, (None, None))
        if base is not None and last == self.rate:
            return base, True
        return self.rate, self.steps_done() == 0

    def remember_base_rate(self, base: float) -> None:
        """Keeps what `base_rate` returns in the next call of `fit`."""
        _BASE_RATES[self.optimizer] = (base, self.rate)

    def steps_done(self) -> int:
        """How many steps the optimizer has seen in its life, steps that only accumulate gradients included."""
        counter = next((v for v in self.optimizer.variables if v.name == "iteration"), self.optimizer.iterations)
        return int(keras.ops.convert_to_numpy(counter))

    def plan(self, execution: tuple[int, int], rates: list[float | None], momentum_correction: bool) -> None:
        """Sets the rates of the steps of one execution.

        Args:
            execution: Epoch and first batch. Several callbacks may plan for one execution; the last one counts.
            rates: One for each step; None leaves that of the step before, or of another callback.
            momentum_correction: Whether momentum is multiplied by `new / old` where the rate changes. A schedule
                changes it in every step, and who has restarted does not know what it was multiplied by before.
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
            self._take(table[0, 0], table[1, 0])
        else:
            self._table.assign(table)
            self._cursor.assign(0)

    def release(self, user: Any) -> None:
        """Ends the use by one callback; the last one leaves the model as it was."""
        self.users.discard(user)
        if not self.users:
            self.restore()

    def restore(self) -> None:
        """Leaves the model as it was, with the last rate."""
        if _OF_MODEL.get(self._model) is not self:
            return  # A later call of `fit` has done it.
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
            self._take_next()
            return train_step(data)

        return step_with_its_rate

    def _take_next(self) -> None:
        """In each step of an execution: takes the rate and the correction of momentum from the table."""
        index = self._cursor.read_value()
        row = tf.gather(self._table.read_value(), tf.minimum(index, self.steps - 1), axis=1)
        planned = index < self.steps  # Not so in a step that no callback knew of.
        current = self._factor.read_value() if self._factor is not None else self.optimizer.learning_rate
        rate = tf.where(planned, row[0], tf.cast(tf.convert_to_tensor(current), tf.float32))
        self._take(rate, tf.where(planned, row[1], 1.0))
        self._cursor.assign_add(1)

    def _take(self, rate: Any, correction: Any) -> None:
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
    """Returns the rates of a model for a callback, which calls `release` when training ends."""
    rates = _OF_MODEL.get(model)
    if rates is not None and (rates.optimizer is not _innermost(model) or rates.steps != model.steps_per_execution):
        rates.restore()  # The model was compiled anew after a `fit` that ended with an error.
        rates = None
    if rates is None:
        rates = _OF_MODEL[model] = StepRates(model)
    rates.users.add(user)
    return rates


def _innermost(model: keras.Model) -> Any:
    """Returns the optimizer that has the rate, from within a LossScaleOptimizer."""
    optimizer: Any = getattr(model, "optimizer", None)
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if optimizer is None:
        raise UnsupportedError(
            explain(
                "A callback for the learning rate finds no optimizer in the model.",
                received="model.optimizer: None",
                expected="a model with an optimizer",
                do="Give it to `model.compile(...)`, or assign the rates in your own `train_step`.",
            )
        )
    return optimizer


def _as_schedule(optimizer: Any) -> Any:
    """Returns the schedule that the optimizer's rate comes from; None if the rate is a variable."""
    kept = list(vars(optimizer).values())
    if any(one is optimizer.learning_rate for one in kept if isinstance(one, keras.Variable)):
        return None
    for one in kept:
        if isinstance(one, keras.optimizers.schedules.LearningRateSchedule):
            return one
    raise UnsupportedError(
        explain(
            "The learning rate of the optimizer can neither be set nor multiplied.",
            received=f"{type(optimizer).__name__}(learning_rate=<a function>)",
            expected="a number or a `LearningRateSchedule`",
            do="Give the optimizer a number, and the function to LearningRateScale(function, per='step').",
        )
    )


def _scaled(schedule: Any, factor: tf.Variable) -> Any:
    """Returns a schedule that is `schedule` times a variable, and is saved as `schedule`."""
    kind = type(schedule)

    class Scaled(kind):  # type: ignore[valid-type, misc]
        __class__ = property(lambda self: kind)  # What Keras writes into a file.

        def __call__(self, step: Any) -> Any:
            return kind.__call__(self, step) * factor

    scaled: Any = object.__new__(Scaled)
    scaled.__dict__.update(schedule.__dict__)
    return scaled


def _momentums(optimizer: Any) -> list[Any]:
    """Returns the slots that hold past steps with their rates in them: those of SGD and RMSprop with momentum."""
    if not getattr(optimizer, "momentum", None):
        return []
    return [v for v in optimizer.variables if v.name.endswith("_momentum")]


def _variable(value: Any) -> tf.Variable:
    """Returns a variable of which each replica counts on its own copy."""
    return tf.Variable(value, trainable=False, aggregation=tf.VariableAggregation.NONE)
