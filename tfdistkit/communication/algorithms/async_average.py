"""`AsyncModelAverage`: a thread averages the weights of the workers while their steps go on."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from tfdistkit.communication.algorithms import rounds
from tfdistkit.communication.algorithms.background import APPLY, SEND, BackgroundAverage
from tfdistkit.communication.algorithms.local_sgd import LocalSGD, _Round
from tfdistkit.communication.reducer import MakeState, Wire
from tfdistkit.validation import require_integer

# Of averages of this process: all ranks build their optimizers in one order.
_NUMBERS = itertools.count()


class AsyncModelAverage(LocalSGD):
    """Averages the weights of the workers at intervals of milliseconds, while they continue with their steps.

    A step never waits for an average. At the end of a step a worker hands a copy of its weights to a thread, which
    waits for the copies of the others; at the end of a later step it adds what the average differs from the copy, so
    that nothing which it has learned since is lost. So weights never change within a step. Workers differ until the end
    of an epoch, `evaluate`, `predict`, a backup or a checkpoint: there no average is under way, and all are equal.

    When an average begins and ends depends on time: no two runs are the same, and a resumed run is not the
    uninterrupted one. It needs shared memory or Horovod.

    Args:
        every_ms: Milliseconds between two averages, at least.
        warmup_steps: The number of synchronous steps at the start.

    Raises:
        OptionError: (a ValueError) if an argument is out of range.
        UnsupportedError: (a RuntimeError) in the first step, as `LocalSGD`, and over TensorFlow's ring.
    """

    def __init__(self, every_ms: int = 500, warmup_steps: int = 0):
        self.every_ms = require_integer("every_ms", every_ms)
        super().__init__(1, warmup_steps)

    def describe(self) -> str:
        return f"{type(self).__name__}(every_ms={self.every_ms}, warmup_steps={self.warmup_steps})"

    def build_outer(self, variables: list[Any], make_state: MakeState) -> list[Any]:
        # The rows since the last copy; those since all workers were equal are in `rows`.
        fresh = make_state(variables[0], "local_fresh", shape=(), dtype="float32", of_replica=True)
        return [fresh, BackgroundAverage(str(next(_NUMBERS)), self.every_ms / 1000)]

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        state[0].outer[1].use(wire.background())  # Here, to be refused before the first step.
        return super().reduce(gradients, variables, state, wire)

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        current: _Round = state[0]
        fresh, average = current.outer
        steps, rows = rounds.count_step(current, wire, self.warmup_steps)
        fresh.assign(fresh + rows)
        values = [tf.convert_to_tensor(variable) for variable in current.variables]

        def send() -> bool:
            sent = [tf.convert_to_tensor(fresh), *(_as_sent(value) for value in values)]
            done = tf.numpy_function(average.send, sent, tf.bool, stateful=True)
            with tf.control_dependencies([done]):
                fresh.assign(tf.zeros([], tf.float32))
            return True

        def apply() -> bool:
            changes = tf.numpy_function(average.take, [], _sent_dtypes(values), stateful=True)
            _add(current.variables, values, tf.nest.flatten(changes))
            return True

        todo = tf.numpy_function(average.poll, [steps], tf.int64, stateful=True)
        todo.set_shape([])
        tf.cond(tf.equal(todo, SEND), send, lambda: False)
        tf.cond(tf.equal(todo, APPLY), apply, lambda: False)

    def settle(self, what: Any, wire: Wire) -> None:
        current: _Round = what
        fresh, average = current.outer
        values = [tf.convert_to_tensor(variable) for variable in current.variables]
        sent = [tf.convert_to_tensor(fresh), *(_as_sent(value) for value in values)]
        changes = tf.nest.flatten(tf.numpy_function(average.finish, sent, _sent_dtypes(values), stateful=True))
        _add(current.variables, values, changes)
        with tf.control_dependencies(changes):
            fresh.assign(tf.zeros([], tf.float32))
        # No copy is under way on any worker. The weights are equal but for rounding, which this ends.
        self._average(current, wire)


def _as_sent(value: tf.Tensor) -> tf.Tensor:
    return value if value.dtype == tf.float64 else tf.cast(value, tf.float32)


def _sent_dtypes(values: list[tf.Tensor]) -> list[tf.DType]:
    return [_as_sent(value).dtype for value in values]


def _add(variables: list[Any], values: list[tf.Tensor], changes: list[tf.Tensor]) -> None:
    for variable, value, change in zip(variables, values, changes):
        change.set_shape(value.shape)
        variable.assign(value + tf.cast(change, value.dtype))
