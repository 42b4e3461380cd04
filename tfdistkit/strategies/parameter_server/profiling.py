"""Measures where the training time of a parameter-server job goes, on its workers and its coordinator.

Timestamp operations in the graph of a step run on the worker, beside the step, as in `step_clock`; their results are
returned with the step's results. The coordinator adds up its own work while workers are idle.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.strategies.step_clock import Times
from tfdistkit.strategies.sync import row_counts

_LOCAL = threading.local()

# Length of the vector of `Stopwatch.times`.
_NUMBERS = 5
# Operations that read a variable, or rows of it, from a server.
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class CoordinatedClock:
    """Measures the training steps that workers run for the coordinator.

    Args:
        num_workers: The number of workers.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        # TensorFlow first builds the step on every worker, which does not count as training time.
        self._results, self._is_warm = 0, False
        self.reset()

    def reset(self) -> None:
        """Begins an epoch."""
        self._executions, self._began, self._ended = 0, 0.0, 0.0
        self._outside_s = self._input_s = self._waiting_s = 0.0
        self._of_workers: np.ndarray = np.zeros(4)

    def times(self) -> Times:
        """Returns the times since `reset`; seconds of workers are means over the workers."""
        total_s = max(self._ended - self._began, 1e-9)
        rows, busy_s, communication_s, input_s = self._of_workers / [1, *[self._num_workers] * 3]
        # Idle workers wait for the coordinator: for its data, its callbacks, or its scheduling.
        idle_s = max(0.0, total_s - busy_s)
        own_s = max(total_s - self._waiting_s, self._input_s + self._outside_s, 1e-9)
        waits_for_input_s = min(self._input_s, idle_s * self._input_s / own_s)
        outside_s = min(self._outside_s, idle_s * self._outside_s / own_s)
        communication_s += idle_s - waits_for_input_s - outside_s
        input_s += waits_for_input_s
        return Times(self._executions, float(rows), total_s, input_s, communication_s, outside_s)

    # Called by the coordinator.

    @contextlib.contextmanager
    def execution(self) -> Iterator[None]:
        """Measures one execution of `fit`."""
        called = time.monotonic()
        if self._executions:
            self._outside_s += called - self._ended
        else:
            self._began = called
        yield
        self._executions += 1
        self._ended = time.monotonic()

    @contextlib.contextmanager
    def input(self) -> Iterator[None]:
        """Measures the time in which the coordinator reads a batch."""
        began = time.monotonic()
        yield
        self._input_s += time.monotonic() - began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures the time in which the coordinator waits for workers."""
        began = time.monotonic()
        yield
        self._waiting_s += time.monotonic() - began

    def end(self) -> None:
        """Ends an epoch, after its last step."""
        self._ended = time.monotonic()

    def take(self, vectors: list[np.ndarray]) -> None:
        """Removes the times of a worker from the results of its step, and adds them up.

        Args:
            vectors: Vectors of different dtypes. `Stopwatch.times` is at the end of the float32 vector.
        """
        i = _index_of_float32(vectors)
        self._of_workers += vectors[i][-_NUMBERS:-1]
        vectors[i] = vectors[i][:-_NUMBERS]
        self._results += 1

    def has_warmed_up(self) -> bool:
        """Returns True once, when all workers have built the step and measuring can begin."""
        if self._is_warm or self._results < self._num_workers:
            return False
        self._is_warm = True
        return True


class Stopwatch:
    """Adds timestamps to the graph of one step, taken on the worker that runs it."""

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._first = len(self._graph.get_operations())
        self._began = tf.timestamp()
        self._read_s: Any = None
        self._computed: Any = None
        self._came: Any = None

    def gradients_are_there(self, gradients: Any) -> None:
        """Takes the time at which gradients are computed; only the first call of a step counts."""
        if self._computed is not None or tf.compat.v1.get_default_graph() is not self._graph:
            return
        there = [t for t in tf.nest.flatten(gradients, expand_composites=True) if tf.is_tensor(t)]
        # Skip reads whose result is unused: TensorFlow prunes them, and to keep them would read whole tables.
        needed = _behind(there, self._operations())
        reads = [one.outputs[0] for one in needed if one.type in _READS]
        numbers = [tf.reshape(t, [-1])[:1] for t in reads if t.dtype.is_floating or t.dtype.is_integer]
        # Use the values: otherwise TensorFlow would wait for the read on the server, not for the transfer to here.
        # The coordinator drops the sum.
        self._came = tf.add_n([tf.reduce_sum(tf.cast(number, tf.float32)) for number in numbers] or [tf.zeros([])])
        with tf.control_dependencies([self._came]):
            read = tf.timestamp()
        with tf.control_dependencies(there):
            self._computed = tf.maximum(read, tf.timestamp())
        self._read_s = read - self._began

    def times(self, data: Any, logs: Any) -> tf.Tensor:
        """Returns, as float32: rows; seconds of the step, of communication, of waiting for data; a number to drop.

        Args:
            data: The batch of the step.
            logs: The result of the step.
        """
        changes = [one for one in self._operations() if any(t.dtype == tf.resource for t in one.inputs)]
        changes = [one for one in changes if not one.outputs]
        # One group for each server: every edge between two processes costs a message.
        by_server: dict[str, list[Any]] = {}
        for one in changes:
            by_server.setdefault(one.device, []).append(one)
        written = []
        for device, operations in by_server.items():
            with tf.device(device):
                written.append(tf.group(*operations))
        there = [t for t in tf.nest.flatten(logs, expand_composites=True) if tf.is_tensor(t)]
        with tf.control_dependencies([*written, *there]):
            ended = tf.timestamp()
        rows = row_counts.count_rows(data)[0]
        communication_s = tf.zeros([], tf.float64)
        if self._computed is not None:
            communication_s = self._read_s + (ended - self._computed)
        found = [tf.cast(0 if rows is None else rows, tf.float64), ended - self._began, communication_s]
        came = tf.zeros([]) if self._came is None else self._came
        # In one tensor: each result costs a message.
        return tf.stack([*(tf.cast(one, tf.float32) for one in found), tf.zeros([]), came])

    def _operations(self) -> list[Any]:
        return self._graph.get_operations()[self._first :]


@contextlib.contextmanager
def stopwatch(clock: CoordinatedClock | None) -> Iterator[Stopwatch | None]:
    """Measures the step that this thread traces.

    Args:
        clock: The clock, or None for no measurement.

    Yields:
        The stopwatch, or None.
    """
    _LOCAL.current = None if clock is None else Stopwatch()
    try:
        yield _LOCAL.current
    finally:
        _LOCAL.current = None


def with_input(vectors: list[tf.Tensor], began: tf.Tensor) -> list[tf.Tensor]:
    """Adds the time in which steps waited for the worker's own data: the time that was not spent in a step.

    Args:
        vectors: As for `CoordinatedClock.take`; the sum over the steps.
        began: When the worker first asked for data.
    """
    i = _index_of_float32(vectors)
    times = vectors[i][-_NUMBERS:]
    with tf.control_dependencies([times]):
        waited_s = tf.cast(tf.timestamp() - began, tf.float32) - times[1]
    added = tf.concat([vectors[i][:-_NUMBERS], times + waited_s * [0.0, 1.0, 0.0, 1.0, 0.0]], 0)
    return [*vectors[:i], added, *vectors[i + 1 :]]


def gradients_are_there(gradients: Any) -> None:
    """Passes gradients to the stopwatch of the step that this thread traces, if there is one."""
    current = getattr(_LOCAL, "current", None)
    if current is not None:
        current.gradients_are_there(gradients)


def _behind(tensors: list[tf.Tensor], operations: list[Any]) -> list[Any]:
    """Returns the operations that tensors are computed from."""
    left, found = [t.op for t in tensors], set()
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [*(t.op for t in one.inputs), *one.control_inputs]
    return [one for one in operations if one in found]


def _index_of_float32(vectors: list[Any]) -> int:
    return next(i for i, vector in enumerate(vectors) if vector.dtype == np.float32)
