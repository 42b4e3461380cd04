"""Compares every case of the table, under every engine, with one process on the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity import engines
from parity.cases import CASES
from parity.comparing import differences, rank_differences
from parity.tolerances import ON_OTHER_KERAS, ON_OTHER_PROCESSORS, reasons_of, tolerance_of

# A new synchronous strategy needs one more name here, and one row in making.py.
ENGINES = (
    "mirrored",
    "central_storage",
    "multiworker",
    "multiworker_ring",
    pytest.param("horovod", marks=pytest.mark.horovod),
    pytest.param("horovod_mpi", marks=[pytest.mark.horovod, pytest.mark.thorough]),
)

# Momenta are sums of gradients that cancel out near an optimum; they are rounded like the gradients.
_LOOSER_FOR_OPTIMIZER_STATE = 10

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_equals_one_process(runs: Any, engine: str, case: str) -> None:
    runs.start(engine)  # In parallel with the reference.
    (expected,), ranks = runs.records("one", case), runs.records(engine, case)
    for record in (expected, *ranks):
        assert record.error is None, record.values["traceback"]
    assert "history" in expected.values and expected.values["weights_paths"]

    assert rank_differences(ranks) == [], "the ranks differ"

    found = differences(expected, ranks[0])
    tolerance = tolerance_of(CASES[case], expected.values["keras"])
    if not CASES[case].exact:
        assert all(np.isfinite(curve).all() for curve in ranks[0].values["history"].values())
        assert all(np.isfinite(array).all() for array in ranks[0].arrays.values())
        return
    limits = {name: tolerance * (_LOOSER_FOR_OPTIMIZER_STATE if "optimizer" in name else 1) for name in found}
    too_far = {name: value for name, value in found.items() if value > limits[name]}
    assert not too_far, f"{engine} differs from one process: {too_far}"


def test_every_looser_tolerance_has_a_reason() -> None:
    for case in CASES.values():
        assert case.tolerance == 1e-6 or len(case.reason) > 20, case.name
    for name, (tolerance, reason) in {**ON_OTHER_PROCESSORS, **ON_OTHER_KERAS}.items():
        assert tolerance > CASES[name].tolerance and len(reason) > 20, name


def test_reasons_are_in_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "exactness.md"
    text = " ".join(page.read_text().split())
    for case in CASES.values():
        for reason in reasons_of(case):
            assert f"`{case.name}`" in text and " ".join(reason.split()) in text, case.name


@pytest.mark.cases("save_and_resume")
@pytest.mark.parametrize("engine", ENGINES)
def test_saved_state_equals_trained_state(runs: Any, engine: str) -> None:
    for record in runs.records(engine, "save_and_resume"):
        for kind in ("weights", "optimizer"):
            trained = [record.arrays[n] for n in sorted(record.arrays) if n.startswith(f"{kind}.")]
            assert len(trained) > 3
            for form in ("loaded", "other"):
                loaded = [record.arrays[n] for n in sorted(record.arrays) if n.startswith(f"{form}_{kind}.")]
                assert len(loaded) == len(trained)
                assert all(np.array_equal(a, b) for a, b in zip(trained, loaded)), (form, kind)


@pytest.mark.cases("save_and_resume")
@pytest.mark.parametrize("engine", ENGINES)
def test_loads_where_there_is_no_tfdistkit(runs: Any, engine: str, tmp_path: Path) -> None:
    """A process that cannot import tfdistkit loads the file of each rank."""
    for rank, record in enumerate(runs.records(engine, "save_and_resume")):
        saved = runs.folder / engine / f"save_and_resume.{rank}" / "model.keras"
        script = Path(__file__).with_name("load_alone.py")
        job = engines.start(tmp_path / str(rank), [str(script), str(saved), str(tmp_path / "loaded.npz")])
        job.wait(120)
        with np.load(tmp_path / "loaded.npz") as loaded:
            for kind in ("weights", "optimizer"):
                trained = [record.arrays[n] for n in sorted(record.arrays) if n.startswith(f"{kind}.")]
                assert len(trained) > 3
                found = [loaded[n] for n in sorted(loaded.files) if n.startswith(f"{kind}.")]
                assert len(found) == len(trained)
                assert all(np.array_equal(a, b) for a, b in zip(trained, found)), kind
            assert np.abs(loaded["prediction"] - record.arrays["predict.000"]).max() < 1e-6
