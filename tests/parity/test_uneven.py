"""Batches that do not divide: parts differ by one row, no replica computes on zero rows.

Two replicas are tested with the other cases (test_exactness.py); here one process has four.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from parity import engines
from parity.comparing import of_numbers

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of each part of run_uneven.py."""
    folder = tmp_path_factory.mktemp("uneven")
    engines.start(folder, ["-m", "parity.run_uneven", str(folder)]).wait(400)
    return dict(json.loads((folder / "seen.json").read_text()))


def _of(seen: dict[str, Any], part: str) -> Any:
    assert "error" not in seen[part], seen[part]["error"]
    return seen[part]


def test_four_replicas_give_what_one_process_gives(seen: dict[str, Any]) -> None:
    numbers = _of(seen, "equal")
    assert len(numbers["one"]) == 19
    for name, expected in numbers["one"].items():
        pairs = zip(expected, numbers["four"][name]) if name == "weights" else [(expected, numbers["four"][name])]
        assert all(of_numbers(one, four) < 1e-11 for one, four in pairs), name


def test_parts_differ_by_one_row_and_none_is_empty(seen: dict[str, Any]) -> None:
    rows = _of(seen, "parts")
    assert sorted(rows[:4], reverse=True) == [3, 3, 2, 2]
    assert sorted(rows[4:], reverse=True) == [2, 1, 1, 1]


def test_tensors_with_other_rows_are_named(seen: dict[str, Any]) -> None:
    found = _of(seen, "graphs")
    for name, numbers in (("known", "20 in `0/edges`"), ("unknown", "20 in `0/edges`, 4 in `0/nodes`")):
        assert numbers in found[name], found[name]
        assert "same_for_all_rows" in found[name] and "tf.RaggedTensor" in found[name]
    assert "edges" in found["on_batch"]


def test_named_tensors_are_whole_on_every_replica(seen: dict[str, Any]) -> None:
    found = _of(seen, "graphs")
    assert np.allclose(found["named"], found["alone"], rtol=1e-6)


def test_other_arguments_of_a_step_are_not_taken_for_the_batch(seen: dict[str, Any]) -> None:
    found = _of(seen, "arguments")
    assert np.allclose(found["seen"], found["expected"], rtol=1e-6)


def test_a_ragged_batch_and_a_number_on_batch(seen: dict[str, Any]) -> None:
    found = _of(seen, "ragged")
    assert of_numbers(found["one"], found["four"]) < 1e-6
