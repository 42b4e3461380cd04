"""`tfdistkit.collectives` between real processes: values and gradients against NumPy, mistakes, timeouts."""

from __future__ import annotations

import json

import collective_parts as parts
import numpy as np
import pytest
from collective_cases import CASES, expected, inputs
from rank_jobs import ENGINES

pytestmark = pytest.mark.tensorflow

MODES = ("eager", "graph", "eager replica", "graph replica")

on_two_ranks = pytest.mark.parametrize("engine", ENGINES)
on_two_or_three = pytest.mark.parametrize(
    ("engine", "world_size"),
    [
        pytest.param("multiworker", 2),
        pytest.param("multiworker", 3, marks=pytest.mark.thorough),
        pytest.param("multiworker_ring", 2, marks=pytest.mark.thorough),
        pytest.param("horovod", 2, marks=pytest.mark.horovod),
        pytest.param("horovod_mpi", 2, marks=[pytest.mark.horovod, pytest.mark.thorough]),
    ],
)


# Must run first: it tests the first calls in a process.
@pytest.mark.part(parts.FIRST_CALLS)
@on_two_ranks
def test_mismatches_are_errors_on_every_rank(printed: list[str]) -> None:
    assert printed == ["all seen\n"] * 2


@pytest.mark.part(parts.IN_GRAPHS)
@on_two_ranks
def test_mismatches_in_graphs_are_errors_on_every_rank(printed: list[str]) -> None:
    assert all(text.endswith("all seen\n") for text in printed)


@pytest.mark.part(parts.EVERY_CASE)
@pytest.mark.parametrize("case", CASES)
@on_two_or_three
def test_values_and_gradients(printed: list[str], case: str, world_size: int) -> None:
    for rank, text in enumerate(printed):
        result, gradient = expected(case, world_size, rank)
        found = {name: both for name, both in json.loads(text).items() if name.partition(", ")[0] == case}
        assert {f"{case}, {mode}" for mode in MODES} <= set(found)
        for mode, (got, derivative) in found.items():
            np.testing.assert_allclose(got, result, atol=1e-12, err_msg=mode)
            np.testing.assert_allclose(derivative, gradient, atol=1e-6, err_msg=f"the gradient of {mode}")


@pytest.mark.part(parts.IN_LOOPS)
@on_two_or_three
def test_loops_and_dynamic_lengths(printed: list[str], world_size: int) -> None:
    given = inputs(world_size)
    for rank, text in enumerate(printed):
        looped, shape_of_gathered, received = json.loads(text)
        np.testing.assert_allclose(looped, 3 * np.concatenate(given.uneven).sum(0))
        assert shape_of_gathered == [world_size * (world_size - 1) // 2, 2]
        assert received == [given.splits[other][rank] for other in range(world_size)]


@pytest.mark.part(parts.TIED)
@on_two_or_three
def test_ranks_with_the_same_extreme_share_the_gradient(printed: list[str], world_size: int) -> None:
    last = world_size - 1
    assert [json.loads(text) for text in printed] == [[1.0, 0.0]] * last + [[1.0, float(world_size)]]


@pytest.mark.part(parts.DTYPES)
@on_two_or_three
def test_every_dtype(printed: list[str], world_size: int) -> None:
    assert printed == ["every dtype\n"] * world_size


@pytest.mark.part(parts.OBJECTS)
@on_two_or_three
def test_objects_and_barriers(printed: list[str], world_size: int) -> None:
    assert printed == ["objects\n"] * world_size


@pytest.mark.part(parts.STRINGS)
@on_two_ranks
def test_strings_are_predicted(printed: list[str]) -> None:
    assert [json.loads(text) for text in printed] == [["", "one", "zwölf", "three", ""]] * 2


@pytest.mark.part(parts.RAGGED)
@on_two_ranks
def test_ragged_outputs_are_predicted(printed: list[str]) -> None:
    rows = [2, 0, 1, 3, 1]
    expected = [[list(range(row)) for row in rows], [[[row]] for row in rows]]
    assert [json.loads(text) for text in printed] == [expected] * 2


@pytest.mark.part(parts.TRACED_AT_OTHER_TIMES)
@on_two_ranks
def test_a_sum_of_constants_is_not_folded(printed: list[str]) -> None:
    assert [text.split() for text in printed] == [["4.0", "6.0", "8.0", "10.0"] * 2] * 2


@pytest.mark.part(parts.UNEVEN_PREDICTIONS)
@on_two_ranks
def test_batches_are_predicted_whose_parts_differ(printed: list[str]) -> None:
    assert printed == ["1.0 2.0 4.0\n" * 4] * 2


@pytest.mark.horovod
@pytest.mark.part(parts.OF_THE_TRANSPORT)
@pytest.mark.parametrize("engine", ["horovod", pytest.param("horovod_mpi", marks=pytest.mark.thorough)])
def test_horovod_detects_mismatches(printed: list[str]) -> None:
    assert printed == ["seen\n"] * 2


# Must run last: TensorFlow's collectives are broken afterwards.
@pytest.mark.part(parts.OF_THE_TRANSPORT, ends_job=True)
@pytest.mark.parametrize(("engine", "world_size"), [("multiworker", 3)])
def test_tensorflow_detects_mismatches(printed: list[str]) -> None:
    assert printed.count("seen\n") + printed.count("left alone\n") == 3
    assert "seen\n" in printed


@pytest.mark.part(parts.ONE_STAYS_AWAY, ends_job=True)
@on_two_ranks
def test_a_barrier_times_out(printed: list[str]) -> None:
    assert printed == ["gave up\n", "stayed away\n"]
