"""What a coordinator makes of the times that its workers noted, and what a step notes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.strategies.parameter_server import profiling as coordinated_clock
from tfdistkit.strategies.parameter_server.profiling import CoordinatedClock, Stopwatch

pytestmark = pytest.mark.tensorflow


class Hands:
    """A clock on the wall that the test moves."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now = 100.0
        patch.setattr(coordinated_clock.time, "monotonic", lambda: self.now)


def seen(rows: float, busy_s: float, communication_s: float, input_s: float = 0.0) -> list[np.ndarray]:
    """What a step of a worker returns: metrics, and what its stopwatch saw."""
    return [np.zeros(2, np.int32), np.array([7, 8, rows, busy_s, communication_s, input_s, np.nan], np.float32)]


def test_idle_workers_wait_for_data_callbacks_and_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, clock = Hands(monkeypatch), CoordinatedClock(2)
    for _ in range(10):
        with clock.execution():
            with clock.input():
                hands.now += 0.3
            with clock.waiting():
                hands.now += 0.4
            hands.now += 0.1
        hands.now += 0.2
    results = [seen(8, 0.6, 0.2) for _ in range(20)]
    for result in results:
        clock.take(result)
    assert [vector.tolist() for vector in results[0]] == [[0, 0], [7, 8]], "the metrics are as they were"
    times = clock.times()
    # The end of the last callback is not seen. Of 9.8 s a worker computes and talks 6 s: it is idle for 3.8 s, while
    # the coordinator is busy for 5.8 s with data (3 s), callbacks (1.8 s) and handing out (1 s).
    assert (times.executions, times.rows, times.total_s) == (10, 160, pytest.approx(9.8))
    assert times.input_s == pytest.approx(3.8 * 3 / 5.8) and times.outside_s == pytest.approx(3.8 * 1.8 / 5.8)
    assert times.communication_s == pytest.approx(2 + 3.8 * 1 / 5.8)
    clock.reset()
    assert clock.times().executions == clock.times().rows == 0


def test_what_workers_wait_for_their_own_data_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, clock = Hands(monkeypatch), CoordinatedClock(1)
    with clock.execution(), clock.waiting():
        hands.now += 2.0
    clock.take(seen(8, 1.5, 0.25, 1.0))
    times = clock.times()
    assert (times.input_s, times.outside_s) == (1.0, 0.0)
    assert times.communication_s == pytest.approx(0.25 + 0.5), "half a second until the worker had its orders"


def test_it_begins_when_all_workers_have_built_the_step() -> None:
    clock = CoordinatedClock(2)
    found = []
    for _ in range(4):
        clock.take(seen(8, 1, 1))
        found.append(clock.has_warmed_up())
    assert found == [False, True, False, False]


def test_a_step_notes_its_rows_and_reads_nothing_that_it_would_not_read() -> None:
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
        return watch.seen((x,), {"loss": loss})

    rows, whole_s, communication_s, input_s, _ = step(tf.ones([3])).numpy()
    assert (rows, input_s) == (3, 0) and 0 <= communication_s <= whole_s < 10
    assert weight.numpy() == -1
    graph = step.get_concrete_function(tf.ones([3])).graph
    (unused,) = (one for one in graph.get_operations() if one.type == "ReadVariableOp" and one.outputs[0].shape.rank)
    assert unused.outputs[0].shape == (1000, 4) and unused.outputs[0].consumers() == []
