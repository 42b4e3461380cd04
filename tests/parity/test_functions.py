"""Custom steps: methods, nested functions, loops, one tensor for all replicas.

The processes of an engine run all parts of `run_functions.py` once, and each test looks at one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parity import engines

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1200)]

# These two share their code with the others, which are `thorough`.
ENGINES = (
    *("mirrored", "multiworker"),
    *(pytest.param(engine, marks=pytest.mark.thorough) for engine in ("one_device", "central_storage")),
)

PARTS = (
    *("functions_in_steps", "functions_in_loops", "loops", "methods", "called_before", "freed"),
    *("copies", "same_object", "sparse_input", "other_strategies"),
)


@pytest.fixture(scope="module")
def errors(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[str | None]]:
    """Returns the error of a part under an engine, one element for each of its processes."""
    folders: dict[str, Path] = {}
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]

    def of_part(engine: str, part: str) -> list[str | None]:
        processes = engines.PROCESSES.get(engine, 1)
        if engine not in folders:
            folders[engine] = tmp_path_factory.mktemp(engine)
            chosen = [p.get("part", "branches") for p in params if p.get("engine") == engine]
            words = ["-m", "parity.run_functions", engine, str(folders[engine]), *dict.fromkeys(chosen)]
            job = engines.start(folders[engine], words, processes)
            job.wait(1000, check=False)
        files = [folders[engine] / f"{part}.{rank}.json" for rank in range(processes)]
        log = engines.Job(folders[engine]).logs
        return [json.loads(file.read_text()) if file.exists() else f"it did not end\n{log()}" for file in files]

    return of_part


@pytest.mark.parametrize("engine", ["mirrored", "central_storage"])
def test_a_sum_in_a_branch_is_correct_or_times_out(errors: Callable[[str, str], list[str | None]], engine: str) -> None:
    (error,) = errors(engine, "branches")
    assert error is None, error


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_step_works_as_written(errors: Callable[[str, str], list[str | None]], engine: str, part: str) -> None:
    found = errors(engine, part)
    assert not any(found), "\n".join(str(error) for error in found)
