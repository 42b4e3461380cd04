"""Steps with state of their own, as users write them: what they count or average weighs the loss of later steps.

The state is a variable of any kind, which a step writes before or after it reads it. Nothing here knows of a strategy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from fuzz import number_losses
from fuzz.networks import like
from fuzz.programs import Program

_SIZE = 2


def _variable(**options: Any) -> Callable[[Any], Any]:
    return lambda model: tf.Variable(tf.zeros([_SIZE], keras.config.floatx()), **options)


# Each makes the state of a model: a vector of two numbers.
STATES: dict[str, Callable[[Any], Any]] = {
    "raw": _variable(),  # As people write it, without `trainable=False`.
    "raw_fixed": _variable(trainable=False),
    "raw_mean": _variable(trainable=False, aggregation=tf.VariableAggregation.MEAN),
    "raw_first": _variable(trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA),
    "raw_int": lambda model: tf.Variable(tf.zeros([_SIZE], tf.int32), trainable=False),
    "raw_int_trainable": lambda model: tf.Variable(tf.zeros([_SIZE], tf.int32)),
    "weight": lambda model: model.add_weight(shape=(_SIZE,), initializer="zeros", trainable=False, name="own_state"),
    "keras": lambda model: keras.Variable(ops.zeros((_SIZE,)), trainable=False, name="own_state"),
}


def _set(state: Any, value: Any) -> None:
    state.assign(tf.cast(value, state.dtype))


def _count(state: Any, y: Any, predicted: Any) -> None:
    positive = ops.sum(ops.cast(y > 0.0, "int32"))
    state.assign_add(tf.cast(tf.stack([positive, ops.sum(ops.cast(y <= 0.0, "int32"))]), state.dtype))


def _average(state: Any, y: Any, predicted: Any) -> None:
    new = tf.stack([ops.mean(ops.abs(y - predicted)), ops.mean(predicted)])
    _set(state, 0.9 * tf.cast(state, new.dtype) + 0.1 * new)


def _subtract(state: Any, y: Any, predicted: Any) -> None:
    new = tf.stack([ops.mean(y - predicted), ops.max(ops.abs(predicted))])
    state.assign_sub(tf.cast(0.1 * (tf.cast(state, new.dtype) - new), state.dtype))


def _extreme(state: Any, y: Any, predicted: Any) -> None:
    new = tf.stack([ops.max(ops.abs(y)), -ops.min(predicted)])
    _set(state, tf.maximum(tf.cast(state, new.dtype), new))


def _last(state: Any, y: Any, predicted: Any) -> None:
    _set(state, tf.stack([ops.mean(ops.square(y - predicted)), ops.sum(y)]))


def _steps(state: Any, y: Any, predicted: Any) -> None:
    state.assign_add(tf.ones([_SIZE], state.dtype))


def _in_branch(state: Any, y: Any, predicted: Any) -> None:
    error = ops.mean(ops.abs(y - predicted))
    value = tf.stack([error, ops.mean(y)])
    tf.cond(error > 0.4, lambda: _set(state, value), lambda: None)


UPDATES: dict[str, Callable[[Any, Any, Any], None]] = {
    "": lambda state, y, predicted: None,
    "count": _count,
    "average": _average,
    "subtract": _subtract,
    "extreme": _extreme,
    "last": _last,
    "steps": _steps,
    "in_branch": _in_branch,
}
# Those that make sense for integers.
UPDATES_OF_INTEGERS = ("count", "steps")


def _weigh_rows(state: Any, y: Any, predicted: Any) -> Any:
    positive, negative = tf.unstack(1.0 / (1.0 + 0.1 * tf.abs(state)))
    return ops.mean(ops.where(y > 0.0, positive, negative) * ops.square(y - predicted))


def _weigh(state: Any, y: Any, predicted: Any) -> Any:
    return ops.mean(ops.square(y - predicted)) / (1.0 + tf.reduce_sum(tf.abs(state)))


def _baseline(state: Any, y: Any, predicted: Any) -> Any:
    return ops.mean(ops.square(y - predicted - 0.1 * state[0]))


def _threshold(state: Any, y: Any, predicted: Any) -> Any:
    error = ops.abs(y - predicted)
    hard = ops.cast(error > 0.5 * state[0], predicted.dtype)
    return ops.sum(hard * error) / ops.maximum(ops.sum(hard), 1.0)


def _choose(state: Any, y: Any, predicted: Any) -> Any:
    return tf.cond(
        tf.reduce_sum(state) > 1.0,
        lambda: ops.mean(ops.abs(y - predicted)),
        lambda: ops.mean(ops.square(y - predicted)),
    )


# Each makes a loss with the state, cast to the dtype of the predictions.
USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "": lambda state, y, predicted: 0.0,
    "weigh_rows": _weigh_rows,
    "weigh": _weigh,
    "baseline": _baseline,
    "threshold": _threshold,
    "choose": _choose,
}


# What a step does beside, before and after it computes its loss.
EFFECTS: dict[str, Callable[[Any], Any]] = {
    "": lambda predicted: None,
    "assert": lambda predicted: tf.debugging.assert_less(tf.abs(predicted), tf.cast(1e6, predicted.dtype)),
    "check_numerics": lambda predicted: tf.debugging.check_numerics(predicted, "predicted"),
    "print": lambda predicted: tf.print("predicted", tf.reduce_mean(predicted), output_stream=sys.stderr),
    "python": lambda predicted: tf.py_function(lambda rows: None, [predicted], []),
}


class _Stateful(number_losses.Numbers):
    """A step whose loss depends on its state, on numbers of the batch, or on both."""

    state = update = use = effect = way = ""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.own_state = STATES[self.state](self)

    def _loss_of(self, data: Any, training: bool) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        predicted = self(x, training=training)
        y = like(y, predicted)
        EFFECTS[self.effect](predicted)
        if training and self.way == "write_first":
            UPDATES[self.update](self.own_state, y, predicted)
        state = tf.cast(self.own_state, predicted.dtype)
        loss = USES[self.use](state, y, predicted) + number_losses.total(self.names, y, predicted)
        if training and self.way != "write_first":
            UPDATES[self.update](self.own_state, y, predicted)
        EFFECTS[self.effect](predicted)
        return loss + sum(self.losses) if self.losses else loss

    def _apply_changed(self, gradients: list[Any], variables: list[Any], loss: Any) -> None:
        if self.way == "branch":  # Clipped in a branch, as gradients that are applied now and then.
            tf.cond(
                tf.equal(tf.cast(self.optimizer.iterations, tf.int32) % 2, 0),
                lambda: self.optimizer.apply(self._changed(gradients, loss), variables),
                lambda: self.optimizer.apply([0.5 * g for g in gradients], variables),
            )
        elif self.way == "rate":
            self.optimizer.learning_rate.assign(0.02 / (1.0 + tf.cast(loss, tf.float32)))
            self.optimizer.apply(self._changed(gradients, loss), variables)
        else:
            super()._apply_changed(gradients, variables, loss)


# How a step goes: "" writes its state after it has read it.
WAYS = ("", "write_first", "branch", "rate")


def step_of(program: Program) -> type:
    """Returns a class with the step of a program, to mix in."""
    fields = {name: getattr(program, name) for name in ("state", "update", "use", "effect", "way", "change")}
    return type("OwnStateful", (_Stateful,), {"names": program.numbers, **fields})
