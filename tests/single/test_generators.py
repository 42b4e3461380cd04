"""Which batches the passes over a Python generator get: those that no step has used are given back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow


def _count_up(start: int = 0) -> Iterator[int]:
    yield from itertools.count(start)


def _reader(generator: Iterator[Any]) -> Any:
    from tfdistkit.data.generators import GeneratorReader

    reader = GeneratorReader(generator)
    list(itertools.islice(reader.peek(), 2))  # As Keras does, for the shapes.
    return reader


def _pass(reader: Any, steps: int, read: int, executions: int = 1) -> list[Any]:
    """Runs steps over a pipeline that has read a number of batches; returns all that were read."""
    batches = list(itertools.islice(reader.begin_pass(), read))
    _steps(reader, steps, executions)
    return batches


def _steps(reader: Any, steps: int, executions: int = 1) -> None:
    for _ in reader.steps(lambda _: iter(range(steps)), SimpleNamespace(steps_per_execution=executions)):
        pass


@pytest.mark.parametrize("ahead", (0, 1, 2, 5, 30))
def test_passes_are_equal_however_far_each_reads_ahead(ahead: int) -> None:
    """One batch more than the steps use is lost, as in one process."""
    reader = _reader(_count_up())
    assert _pass(reader, 5, 5 + ahead)[:5] == [0, 1, 2, 3, 4]
    assert _pass(reader, 5, 5 + ahead)[:5] == [0, 1, 6, 7, 8]
    assert _pass(reader, 2, 5 + ahead, executions=2)[:4] == [0, 1, 10, 11]
    assert _pass(reader, 1, 3)[2] == 13


@pytest.mark.parametrize("ahead", (0, 1, 2, 5))
def test_calls_are_equal_however_far_each_reads_ahead(ahead: int) -> None:
    from tfdistkit.data.generators import ending_readers

    generator, first = _count_up(), []
    for _ in range(4):
        with ending_readers():
            first.append(_pass(_reader(generator), 3, 3 + ahead)[0])
    assert first == [0, 4, 8, 12]


def test_epochs_of_one_pass_go_on() -> None:
    reader = _reader(_count_up())
    batches = reader.begin_pass()
    assert list(itertools.islice(batches, 9)) == list(range(9))
    _steps(reader, 3)
    _steps(reader, 3)
    assert list(itertools.islice(batches, 3)) == [9, 10, 11]
    assert next(itertools.islice(reader.begin_pass(), 2, None)) == 7


def test_a_pass_that_no_step_used_gives_everything_back() -> None:
    """The comparison of ranks may begin an epoch again."""
    reader = _reader(_count_up())
    _pass(reader, 0, 7)
    assert _pass(reader, 3, 5) == [0, 1, 2, 3, 4]


def test_a_generator_that_has_ended_ends_every_pass() -> None:
    reader = _reader(iter(i for i in range(4)))
    assert _pass(reader, 4, 9) == [0, 1, 2, 3]
    assert _pass(reader, 2, 9) == [0, 1]
    short = _reader(iter(i for i in range(6)))
    assert _pass(short, 2, 9) == [0, 1, 2, 3, 4, 5]
    assert _pass(short, 2, 9) == [0, 1, 3, 4, 5]


def test_an_array_that_the_generator_fills_again_keeps_its_numbers() -> None:
    def fill() -> Iterator[np.ndarray]:
        array = np.zeros(1)
        for number in itertools.count():
            array[:] = number
            yield array

    reader = _reader(fill())
    _pass(reader, 3, 8)
    assert [float(one[0]) for one in _pass(reader, 3, 6)[2:]] == [4, 5, 6, 7]


def test_an_ended_pipeline_reads_no_more() -> None:
    reader = _reader(_count_up())
    old = reader.begin_pass()
    assert list(itertools.islice(old, 3)) == [0, 1, 2]
    reader.end()
    assert list(old) == []
