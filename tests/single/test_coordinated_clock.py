"""`CoordinatedClock` adds up the times of the workers; `Stopwatch` measures one step."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.strategies.parameter_server import profiling as coordinated_clock
from tfdistkit.strategies.parameter_server.profiling import CoordinatedClock, Stopwatch

pytestmark = pytest.mark.tensorflow


class FakeTime:
    """Replaces `time.monotonic` by a time that the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now = 100.0
        patch.setattr(coordinated_clock.time, "monotonic", lambda: self.now)


def step_results(rows: float, busy_s: float, communication_s: float, input_s: float = 0.0) -> list[np.ndarray]:
    """Returns the results of a worker's step: metrics, and the times of its stopwatch."""
    return [np.zeros(2, np.int32), np.array([7, 8, rows, busy_s, communication_s, input_s, np.nan], np.float32)]


def test_idle_workers_wait_for_data_callbacks_and_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, clock = FakeTime(monkeypatch), CoordinatedClock(2)
    for _ in range(10):
        with clock.execution():
            with clock.input():
                fake.now += 0.3
            with clock.waiting():
                fake.now += 0.4
            fake.now += 0.1
        fake.now += 0.2
    results = [step_results(8, 0.6, 0.2) for _ in range(20)]
    for result in results:
        clock.take(result)
    assert [vector.tolist() for vector in results[0]] == [[0, 0], [7, 8]], "the metrics are unchanged"
    times = clock.times()
    # The end of the last callback is not measured. Of 9.8 s a worker computes and communicates 6 s: it is idle for
    # 3.8 s, while the coordinator is busy for 5.8 s with data (3 s), callbacks (1.8 s) and scheduling (1 s).
    assert (times.executions, times.rows, times.total_s) == (10, 160, pytest.approx(9.8))
    assert times.input_s == pytest.approx(3.8 * 3 / 5.8) and times.outside_s == pytest.approx(3.8 * 1.8 / 5.8)
    assert times.communication_s == pytest.approx(2 + 3.8 * 1 / 5.8)
    clock.reset()
    assert clock.times().executions == clock.times().rows == 0


def test_the_wait_of_workers_for_their_own_data_is_input_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, clock = FakeTime(monkeypatch), CoordinatedClock(1)
    with clock.execution(), clock.waiting():
        fake.now += 2.0
    clock.take(step_results(8, 1.5, 0.25, 1.0))
    times = clock.times()
    assert (times.input_s, times.outside_s) == (1.0, 0.0)
    assert times.communication_s == pytest.approx(0.25 + 0.5), "half a second until the worker received its step"


def test_measuring_begins_when_all_workers_have_built_the_step() -> None:
    clock = CoordinatedClock(2)
    found = []
    for _ in range(4):
        clock.take(step_results(8, 1, 1))
        found.append(clock.has_warmed_up())
    assert found == [False, True, False, False]


def test_a_stopwatch_counts_rows_and_keeps_no_unused_read() -> None:
    table, weight = tf.Variable(tf.zeros([1000, 4])), tf.Variable(2.0)

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        watch = Stopwatch()
        tf.raw_ops.ReadVariableOp(resource=table.handle, dtype=tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * x)
        gradient = tape.gradient(loss, weight)
        watch.gradients_are_there([gradient])
        weight.assign_sub(gradient)
        return watch.times((x,), {"loss": loss})

    rows, whole_s, communication_s, input_s, _ = step(tf.ones([3])).numpy()
    assert (rows, input_s) == (3, 0) and 0 <= communication_s <= whole_s < 10
    assert weight.numpy() == -1
    graph = step.get_concrete_function(tf.ones([3])).graph
    (unused,) = (one for one in graph.get_operations() if one.type == "ReadVariableOp" and one.outputs[0].shape.rank)
    assert unused.outputs[0].shape == (1000, 4) and unused.outputs[0].consumers() == []
