"""Where the time of a parameter-server job's training goes: what its workers do with it, seen by the coordinator.

In the graph of a step, operations that note the time on the worker stand beside the step, as in `step_clock`; what they
found goes back with the step's results. The coordinator adds up what it does itself while workers have nothing to do.
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
from tfdistkit.strategies.sync import step as steps

_LOCAL = threading.local()

# How many numbers a stopwatch sees.
_SEEN = 5
# What brings the value of a variable, or rows of it, from a server.
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class CoordinatedClock:
    """Measures the training steps that workers run for the coordinator.

    Args:
        num_workers: How many workers there are.
    """

    def __init__(self, num_workers: int):
        self._num_workers = num_workers
        # TensorFlow builds the step on every worker first, which is no part of training it.
        self._results, self._is_warm = 0, False
        self.reset()

    def reset(self) -> None:
        """Begins an epoch."""
        self._executions, self._began, self._ended = 0, 0.0, 0.0
        self._outside_s = self._input_s = self._waiting_s = 0.0
        self._of_workers: np.ndarray = np.zeros(4)

    def times(self) -> Times:
        """Returns what there was since `reset`; seconds of workers are means over them."""
        total_s = max(self._ended - self._began, 1e-9)
        rows, busy_s, communication_s, input_s = self._of_workers / [1, *[self._num_workers] * 3]
        # Workers that do nothing wait for the coordinator: for its data, its callbacks, and for it to hand out steps.
        idle_s = max(0.0, total_s - busy_s)
        own_s = max(total_s - self._waiting_s, self._input_s + self._outside_s, 1e-9)
        waits_for_input_s = min(self._input_s, idle_s * self._input_s / own_s)
        outside_s = min(self._outside_s, idle_s * self._outside_s / own_s)
        communication_s += idle_s - waits_for_input_s - outside_s
        input_s += waits_for_input_s
        return Times(self._executions, float(rows), total_s, input_s, communication_s, outside_s)

    # What the coordinator calls.

    @contextlib.contextmanager
    def execution(self) -> Iterator[None]:
        """Around each execution that `fit` asks for."""
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
        """While the coordinator draws a batch."""
        began = time.monotonic()
        yield
        self._input_s += time.monotonic() - began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While it waits for workers."""
        began = time.monotonic()
        yield
        self._waiting_s += time.monotonic() - began

    def end(self) -> None:
        """When all steps of an epoch have ended."""
        self._ended = time.monotonic()

    def take(self, vectors: list[np.ndarray]) -> None:
        """Takes what a worker noted out of the results of its step.

        Args:
            vectors: Some vectors of different dtypes. `Stopwatch.seen` is at the end of that of float32.
        """
        place = _place(vectors)
        self._of_workers += vectors[place][-_SEEN:-1]
        vectors[place] = vectors[place][:-_SEEN]
        self._results += 1

    def has_warmed_up(self) -> bool:
        """Returns whether measuring can begin with the next step, as all workers have built it: True only once."""
        if self._is_warm or self._results < self._num_workers:
            return False
        self._is_warm = True
        return True


class Stopwatch:
    """Notes the time in the graph of one step, on the worker that runs it."""

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._first = len(self._graph.get_operations())
        self._began = tf.timestamp()
        self._read_s: Any = None
        self._computed: Any = None
        self._came: Any = None

    def gradients_are_there(self, gradients: Any) -> None:
        """Called before an optimizer applies gradients; the first one counts."""
        if self._computed is not None or tf.compat.v1.get_default_graph() is not self._graph:
            return
        there = [t for t in tf.nest.flatten(gradients, expand_composites=True) if tf.is_tensor(t)]
        # Not those that nothing comes of: TensorFlow leaves them out, and a table would be read as a whole.
        needed = _behind(there, self._operations())
        reads = [one.outputs[0] for one in needed if one.type in _READS]
        numbers = [tf.reshape(t, [-1])[:1] for t in reads if t.dtype.is_floating or t.dtype.is_integer]
        # What came is used, if only by the coordinator, which throws it away: otherwise TensorFlow would wait for
        # the read on the server, not for its way here.
        self._came = tf.add_n([tf.reduce_sum(tf.cast(number, tf.float32)) for number in numbers] or [tf.zeros([])])
        with tf.control_dependencies([self._came]):
            read = tf.timestamp()
        with tf.control_dependencies(there):
            self._computed = tf.maximum(read, tf.timestamp())
        self._read_s = read - self._began

    def seen(self, data: Any, logs: Any) -> tf.Tensor:
        """Returns, as float32: rows, seconds of the step, of communication, of waiting for data; a meaningless number.

        Args:
            data: The step's batch.
            logs: What the step returned.
        """
        changes = [one for one in self._operations() if any(t.dtype == tf.resource for t in one.inputs)]
        changes = [one for one in changes if not one.outputs]
        # One for each server: every edge between two processes costs a message.
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
        rows = steps.count_rows(data)[0]
        communication_s = tf.zeros([], tf.float64)
        if self._computed is not None:
            communication_s = self._read_s + (ended - self._computed)
        found = [tf.cast(0 if rows is None else rows, tf.float64), ended - self._began, communication_s]
        came = tf.zeros([]) if self._came is None else self._came
        # Not a result of its own: each of them is a message.
        return tf.stack([*(tf.cast(one, tf.float32) for one in found), tf.zeros([]), came])

    def _operations(self) -> list[Any]:
        return self._graph.get_operations()[self._first :]


@contextlib.contextmanager
def stopwatch(clock: CoordinatedClock | None) -> Iterator[Stopwatch | None]:
    """Within it, gradients are noted that optimizers of this thread apply.

    Args:
        clock: None measures nothing.

    Yields:
        The stopwatch, or None.
    """
    _LOCAL.current = None if clock is None else Stopwatch()
    try:
        yield _LOCAL.current
    finally:
        _LOCAL.current = None


def with_input(vectors: list[tf.Tensor], began: tf.Tensor) -> list[tf.Tensor]:
    """Returns the results of steps with data of the worker's own: what was not step was waiting for data.

    Args:
        vectors: As for `CoordinatedClock.take`; the sum over the steps.
        began: When the worker first asked for data.
    """
    place = _place(vectors)
    seen = vectors[place][-_SEEN:]
    with tf.control_dependencies([seen]):
        waited_s = tf.cast(tf.timestamp() - began, tf.float32) - seen[1]
    added = tf.concat([vectors[place][:-_SEEN], seen + waited_s * [0.0, 1.0, 0.0, 1.0, 0.0]], 0)
    return [*vectors[:place], added, *vectors[place + 1 :]]


def gradients_are_there(gradients: Any) -> None:
    """Tells the stopwatch of the step that this thread traces, if there is one."""
    current = getattr(_LOCAL, "current", None)
    if current is not None:
        current.gradients_are_there(gradients)


def _behind(tensors: list[tf.Tensor], operations: list[Any]) -> list[Any]:
    """Returns those operations that tensors come of."""
    left, found = [t.op for t in tensors], set()
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += [*(t.op for t in one.inputs), *one.control_inputs]
    return [one for one in operations if one in found]


def _place(vectors: list[Any]) -> int:
    return next(place for place, vector in enumerate(vectors) if vector.dtype == np.float32)
