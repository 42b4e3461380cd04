"""Averages in threads: ranks take part in the same ones, lose nothing that they learned meanwhile, and end together."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from tfdistkit.communication.algorithms.background import APPLY, SEND, BackgroundAverage

pytestmark = pytest.mark.tensorflow

DEADLINE_S = 20.0


class Meeting:
    """Sums the arrays of two ranks, which are threads here; counts the sums."""

    timeout_s = DEADLINE_S

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=DEADLINE_S)
        self._given: list[list[np.ndarray]] = []
        self._lock = threading.Lock()
        self.sums = 0

    def sum(self, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
        with self._lock:
            self._given.append(arrays)
        self._barrier.wait()
        totals = [a + b for a, b in zip(*self._given, strict=True)]
        if self._barrier.wait() == 0:
            self._given, self.sums = [], self.sums + 1
        self._barrier.wait()
        return totals

    def interrupt(self) -> None:
        self._barrier.abort()


class Rank:
    """A worker whose weight grows by a number in each step."""

    def __init__(self, meeting: Any, every_s: float = 0.0):
        self.average = BackgroundAverage("test", every_s)
        self.average.use(meeting)
        self.weight = np.zeros(3, np.float32)
        self.rows = 0
        self.averages = 0

    def step(self, more: float) -> int:
        self.weight = self.weight + np.float32(more)
        self.rows += 2
        todo = int(self.average.poll(np.int64(1)))
        if todo == SEND:
            self.average.send(np.float32(self.rows), self.weight)
            self.rows = 0
        if todo == APPLY:
            self.weight = self.weight + self.average.take()[0]
            self.averages += 1
        return todo

    def finish(self) -> None:
        self.weight = self.weight + self.average.finish(np.float32(self.rows), self.weight)[0]
        self.rows = 0


def together(*functions: Any) -> None:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_what_was_learned_meanwhile_is_kept() -> None:
    meeting = Meeting()
    one, other = Rank(meeting), Rank(meeting)
    assert one.step(1.0) == SEND and one.step(0.5) == 0 and one.step(0.5) == 0  # It waits for nobody.
    assert other.step(3.0) == SEND
    for rank in (one, other):
        while rank.step(0.0) != APPLY:
            pass
    # The mean of what was sent, 1 and 3, and what the first has learned since.
    np.testing.assert_allclose(one.weight, 3.0)
    np.testing.assert_allclose(other.weight, 2.0)


@pytest.mark.parametrize("steps", ((1, 1), (1, 400), (400, 0), (0, 0)))
def test_ranks_with_other_numbers_of_steps_end_together(steps: tuple[int, int]) -> None:
    meeting = Meeting()
    ranks = [Rank(meeting), Rank(meeting)]

    def train(rank: Rank, number: int) -> None:
        for _ in range(number):
            rank.step(0.01)
        rank.finish()

    together(*(lambda rank=rank, number=number: train(rank, number) for rank, number in zip(ranks, steps, strict=True)))
    np.testing.assert_allclose(ranks[0].weight, ranks[1].weight, atol=1e-5)
    assert meeting.sums >= 1
    # Nothing is under way: the next steps begin anew.
    assert [rank.step(0.0) for rank in ranks] == [SEND, SEND]
    together(*(rank.finish for rank in ranks))


def test_a_lost_rank_is_an_error_of_the_next_step() -> None:
    class Lost(Meeting):
        def sum(self, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
            raise RuntimeError("Connection closed by peer")

    rank = Rank(Lost())
    assert rank.step(1.0) == SEND
    with pytest.raises(RuntimeError, match="closed by peer"):
        while True:
            rank.step(0.0)
    with pytest.raises(RuntimeError, match="closed by peer"):
        rank.finish()


def test_a_rank_that_never_comes_ends_the_wait() -> None:
    meeting = Meeting()
    meeting.timeout_s = 0.2
    rank = Rank(meeting)
    with pytest.raises(TimeoutError, match="Collective has timed out"):
        rank.finish()
    meeting.interrupt()


def test_a_step_that_updates_twice_sends_once() -> None:
    rank = Rank(Meeting())
    tasks = [int(rank.average.poll(np.int64(1))) for _ in range(2)]  # Both ask before the first sends.
    assert tasks == [SEND, 0]
    rank.average.send(np.float32(2), rank.weight)
    assert int(rank.average.poll(np.int64(2))) == 0  # The average is in flight.


def test_no_average_before_its_time() -> None:
    rank = Rank(Meeting(), every_s=100.0)
    assert [rank.step(1.0) for _ in range(3)] == [0, 0, 0]
    assert int(rank.average.poll(np.int64(0))) == 0
