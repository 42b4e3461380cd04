"""Measures where the time of training steps goes, by timestamps in their graphs.

Timestamp operations run beside the step and wait for the operations that they measure; no operation of the step waits
for them, so the order of the step's own operations does not change.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdistkit.communication.traffic import Traffic
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import row_counts
from tfdistkit.strategies.sync import step as steps

# The clock of each model. A strategy whose steps run in other processes has its own `clock()`.
_OF_MODEL: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

# Sample call overhead on the first 8 executions, then on every 64th.
_SAMPLED_FIRST, _SAMPLED_EVERY = 8, 64
# Upper bound of the call overhead, in seconds: a longer call waited for data.
_MOST_PER_CALL_S = 0.0005


class Times(NamedTuple):
    """The times of an epoch, in this process.

    Args:
        executions: The number of calls of the train function.
        rows: Rows of the global batches.
        total_s: Seconds from the first call to the end of the last.
        input_s: Seconds in which steps waited for data.
        communication_s: Seconds from when a replica had all its summands until it had the sum.
        outside_s: Seconds between the steps: callbacks, and call overhead.
    """

    executions: int
    rows: float
    total_s: float
    input_s: float
    communication_s: float
    outside_s: float


class StepClock:
    """Measures the training steps of a model; made by `attach`."""

    def __init__(self, model: Any):
        extended = model.distribute_strategy.extended
        self._replicas_here = max(1, len(extended.worker_devices)) if private_api.strategy_of(model) else 1
        self._is_inside = False
        self.traffic = _traffic_of(model, self._replicas_here)
        with tf.device("CPU:0"), tf.init_scope():
            # Sums of seconds or rows; the end of the last step; the last wait.
            self._gaps, self._communication, self._rows, self._end, self._gap = (
                tf.Variable(0.0, trainable=False, dtype=tf.float64, name="tfdistkit_clock") for _ in range(5)
            )
        self.reset()

    def reset(self) -> None:
        """Begins an epoch."""
        for variable in (self._gaps, self._communication, self._rows):
            variable.assign(0.0)
        if self.traffic is not None:
            self.traffic.reset()
        self._executions, self._outside_s, self._per_call_s = 0, 0.0, _MOST_PER_CALL_S
        self._began = self._returned = 0.0

    def times(self) -> Times:
        """Returns the times since `reset`."""
        outside_s = self._outside_s + self._executions * self._per_call_s * self._is_inside
        input_s = max(0.0, float(self._gaps.numpy()) - outside_s) if self._is_inside else 0.0
        total_s = max(self._returned - self._began, 1e-9)
        rows, communication_s = float(self._rows.numpy()), float(self._communication.numpy())
        return Times(self._executions, rows, total_s, input_s, communication_s, outside_s)

    # Called by the hooks of Keras's train function.

    def timed(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wraps the function that `fit` calls for each execution."""
        has_run = False

        def timed_function(iterator: Any) -> Any:
            nonlocal has_run
            called = time.time()
            if self._executions:
                self._outside_s += called - self._returned
            else:
                self._began = called
                self._end.assign(called)
            outside_s = called - (self._returned or called)
            result = function(iterator)
            self._returned = time.time()
            self._executions += 1
            if not has_run:  # The first execution includes tracing and compilation, which do not count.
                has_run = True
                self.reset()
            elif self._executions <= _SAMPLED_FIRST or self._executions % _SAMPLED_EVERY == 0:
                self._sample(outside_s)
            return result

        return timed_function

    def _sample(self, outside_s: float) -> None:
        self._per_call_s = max(0.0, min(self._per_call_s, float(self._gap.numpy()) - outside_s))

    def watched(self, step_function: Callable[[Any], Any], model: Any) -> Callable[[Any], Any]:
        """Wraps a train step."""
        if model.jit_compile:
            return step_function  # XLA has no timestamp operation.

        @tf.autograph.experimental.do_not_convert
        def watched_step(data: Any) -> Any:
            step = steps.current()
            if step is not None and step.replica_id % self._replicas_here:
                return step_function(data)  # One replica of a process measures.
            self._is_inside = True
            gap = _time_of(data) - self._end
            self._gaps.assign_add(gap)
            self._gap.assign(gap)
            rows = step.total_rows if step is not None and step.rows is not None else row_counts.count_rows(data)[0]
            if rows is not None:
                self._rows.assign_add(tf.cast(rows, tf.float64))
            if self.traffic is not None:
                self.traffic.count_step()
            if step is not None:
                step.clock, step.traffic = self, self.traffic
            first = _operations()
            logs = step_function(data)
            with tf.control_dependencies(_changes(first)):
                self._end_at(_time_of(logs))
            return logs

        return watched_step

    def begin_sum(self, parts: Any) -> Callable[[Any], None]:
        """Measures a sum over the replicas, or several at once.

        Args:
            parts: The summands of this replica.

        Returns:
            A function to call with the sums.
        """
        begin = _time_of(parts)

        def end(sums: Any) -> None:
            now = _time_of(sums)
            self._communication.assign_add(now - begin)
            self._end_at(now)

        return end

    def _end_at(self, now: tf.Tensor) -> None:
        self._end.assign(tf.maximum(self._end.read_value(), now))


def attach(model: Any) -> Any:
    """Returns the clock of a model; makes the clock and a new train function if it has none."""
    if model not in _OF_MODEL:
        strategy = model.distribute_strategy
        _OF_MODEL[model] = strategy.clock(model) if private_api.is_ours(strategy) else StepClock(model)
        if private_api.is_ours(strategy):
            strategy.count_settling(getattr(_OF_MODEL[model], "traffic", None))
        model.make_train_function(force=True)
    return _OF_MODEL[model]


def clock_of(model: Any, step_function: Any) -> Any:
    """Returns the clock of a model whose train function is being made; None for other functions and models."""
    return None if step_function == model.test_step else _OF_MODEL.get(model)


def _traffic_of(model: Any, replicas_here: int) -> Traffic | None:
    """Returns what counts the bytes of a model's steps; None where they are not known."""
    strategy = private_api.strategy_of(model)
    replicas = strategy.num_replicas_in_sync if strategy else 1
    if replicas == replicas_here:
        return Traffic(1)  # The replicas share the memory of this process.
    # A process of several replicas sends as TensorFlow chooses, and so does a strategy of TensorFlow's own.
    is_known = replicas_here == 1 and private_api.is_ours(strategy) and not model.jit_compile
    return Traffic(replicas) if is_known else None


def _time_of(structure: Any) -> tf.Tensor:
    """Returns the time at which tensors are available."""
    flat = tf.nest.flatten(structure, expand_composites=True)
    with tf.control_dependencies([t for t in flat if tf.is_tensor(t)]):
        return tf.timestamp()


def _operations() -> int:
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def _changes(first: int) -> list[Any]:
    """Returns the operations after the first `first` that write variables: they may end after the step's logs."""
    if tf.executing_eagerly():
        return []
    operations = tf.compat.v1.get_default_graph().get_operations()[first:]
    return [one for one in operations if any(t.dtype == tf.resource for t in one.inputs) and not one.outputs]
