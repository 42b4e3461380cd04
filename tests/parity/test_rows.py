"""The known faults of Keras 3 under tf.distribute, row by row: present without tfdistkit, fixed with it.

Each test first shows the fault under a stock strategy. When a new TensorFlow or Keras fixes it, that part
fails with a message that says so: then the row and its patch can go. docs/exactness.md lists the rows.
"""

from __future__ import annotations

import re
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pytest

from parity import engines
from parity.cases import CASES
from parity.comparing import differences
from tfdistkit.supported import KERAS

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]

ENGINES = ("mirrored", "central_storage", "multiworker")

# Cases of the stock strategy; a row that breaks TensorFlow's collectives comes last.
_STOCK_CASES = ["clipnorm", "rows_103_sgd", "accumulation", "ema_overwrite", "strings", "gan", "own_train_step"]
_STOCK = {
    "mirrored": ("k4", "k8", "k9", "m9"),
    "central_storage": ("c1", "c2"),
    "multiworker": ("m1", "m3", "m6", "m7", "m8", "m5", "m2"),
}
_OURS = {
    "mirrored": ("k3", "k4", "k9", "m9", "k8"),
    "central_storage": ("c1", "c2", "k3", "k4", "k9", "m9", "k8"),
    "multiworker": ("m1", "m2", "m3", "m5", "m6", "m7", "m8", "k3", "k4", "k9", "m9", "k8"),
}


def _versions() -> str:
    found = []
    for package in ("tensorflow", "tensorflow-cpu", "keras"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def assert_broken(broken: bool, row: str, seen: Any) -> None:
    """Fails if the stock strategy no longer has the fault; warns with another Keras than the newest supported one."""
    text = (
        f"{row}: the stock strategy no longer shows this fault with {_versions()}; it gave {str(seen)[:500]}. "
        "Update docs/exactness.md, and check whether its patch can go."
    )
    if not broken and not re.search(rf"\bkeras {KERAS[1][0]}\.{KERAS[1][1] - 1}\.", _versions()):
        warnings.warn(text, stacklevel=2)
        return
    assert broken, text


def _stock_row(runs: Any, engine: str, row: str) -> list[dict[str, Any]]:
    return list(runs.rows(f"stock_{engine}", _STOCK[engine])[row])


def _our_row(runs: Any, engine: str, row: str) -> list[Any]:
    seen = runs.rows(engine, _OURS[engine])[row]
    assert all("error" not in rank for rank in seen), seen
    return [rank["value"] for rank in seen]


def _stock_case(runs: Any, case: str) -> Any:
    runs.start("stock_mirrored", _STOCK_CASES)
    return runs.records("stock_mirrored", case)[0]


def _worst(runs: Any, case: str, found: Any) -> float:
    compared = differences(runs.records("one", case)[0], found)
    return max(value for name, value in compared.items() if name.startswith(("history", "weights")))


def _assert_exact(runs: Any, case: str) -> None:
    for engine in ENGINES:
        for record in runs.records(engine, case):
            assert record.error is None, record.error
            assert _worst(runs, case, record) <= CASES[case].tolerance


def _has_error(seen: list[dict[str, Any]], *words: str) -> bool:
    return all(any(word in rank.get("error", "") for word in words) for rank in seen)


@pytest.mark.thorough  # Takes 15 seconds, and changes with TensorFlow alone.
def test_m1_every_fit_under_multiworker_raises(runs: Any) -> None:
    seen = _stock_row(runs, "multiworker", "m1")
    assert_broken(_has_error(seen, "Attempt to convert a value (PerReplica"), "M1", seen)
    assert np.isfinite(_our_row(runs, "multiworker", "m1")).all()


def test_m2_an_uneven_first_batch_aborts_the_job(runs: Any) -> None:
    seen = _stock_row(runs, "multiworker", "m2")
    assert_broken(_has_error(seen, "Collective ops is aborted"), "M2", seen)
    assert np.isfinite(_our_row(runs, "multiworker", "m2")).all()


def test_m3_scalar_logs_cannot_be_reduced(runs: Any) -> None:
    seen = _stock_row(runs, "multiworker", "m3")
    assert_broken(_has_error(seen, "Invalid reduction dimension"), "M3", seen)
    assert _our_row(runs, "multiworker", "m3") == [2.5, 2.5]


@pytest.mark.cases("accumulation", "ema_overwrite")
@pytest.mark.parametrize("name", ["accumulation", "ema_overwrite"])
def test_m4_merge_call_in_a_branch(runs: Any, name: str) -> None:
    seen = _stock_case(runs, name)
    assert_broken("merge_call" in (seen.error or ""), "M4", seen.error)
    _assert_exact(runs, name)


def test_m5_several_steps_in_one_execution(runs: Any) -> None:
    seen = _stock_row(runs, "multiworker", "m5")
    assert_broken(_has_error(seen, "You must feed a value for placeholder"), "M5", seen)
    first, second = _our_row(runs, "multiworker", "m5")
    assert first == second and np.isfinite(first).all()


def test_m6_bfloat16_cannot_be_gathered(runs: Any) -> None:
    seen = _stock_row(runs, "multiworker", "m6")
    assert_broken(_has_error(seen, "bfloat16"), "M6", seen)
    assert _our_row(runs, "multiworker", "m6") == [[0.0, 1.0]] * 2


def test_m7_moving_statistics_differ_between_ranks(runs: Any) -> None:
    first, second = (np.array(rank["value"]) for rank in _stock_row(runs, "multiworker", "m7"))
    assert_broken(np.abs(first - second).max() > 1e-3, "M7", [first, second])
    first, second = _our_row(runs, "multiworker", "m7")
    assert first == second


def test_m8_an_empty_part_makes_statistics_nan(runs: Any) -> None:
    seen = _stock_row(runs, "multiworker", "m8")
    assert_broken(not np.isfinite([rank["value"] for rank in seen]).all(), "M8", seen)
    first, second = _our_row(runs, "multiworker", "m8")
    assert first == second and np.isfinite(first).all()


@pytest.mark.thorough  # Takes 15 seconds, and changes with TensorFlow alone.
def test_m9_xla_on_cpus(runs: Any) -> None:
    seen = _stock_row(runs, "mirrored", "m9")
    assert_broken("error" in seen[0] and "jit_compile" not in seen[0]["error"].splitlines()[0], "M9", seen)
    for engine in ENGINES:
        for rank in runs.rows(engine, _OURS[engine])["m9"]:
            assert rank["error"].startswith("UnsupportedError: `jit_compile=True` cannot work")


@pytest.mark.cases("clipnorm")
def test_k1_clipping_acts_on_each_replica(runs: Any) -> None:
    seen = _stock_case(runs, "clipnorm")
    assert_broken(seen.error is None and _worst(runs, "clipnorm", seen) > 1e-3, "K1", seen.values)
    _assert_exact(runs, "clipnorm")


@pytest.mark.cases("rows_103_sgd")
def test_k2_uneven_parts_weigh_the_same(runs: Any) -> None:
    seen = _stock_case(runs, "rows_103_sgd")
    assert_broken(seen.error is None and _worst(runs, "rows_103_sgd", seen) > 1e-3, "K2", seen.values)
    _assert_exact(runs, "rows_103_sgd")


@pytest.mark.thorough  # Takes 15 seconds, and changes with TensorFlow alone.
def test_k3_nan_on_one_rank_hangs_the_job(runs: Any, tmp_path: Any) -> None:
    """The rank with the NaN skips its step; the other waits for it."""
    job = engines.start(tmp_path, ["-m", "parity.run_rows", "stock_multiworker", str(tmp_path), "k3"], 2)
    try:
        end = time.monotonic() + 180
        while job.logs().count("K3 starts its step") < 2:
            assert time.monotonic() < end and all(p.poll() is None for p in job.processes), job.logs()
            time.sleep(0.2)
        codes = job.wait(12, check=False)
    finally:
        job.kill()
    skipped = [path.read_text() for path in sorted(tmp_path.glob("k3.*.json"))]
    assert_broken(None in codes or not all('"skipped": true' in text for text in skipped), "K3", [codes, skipped])
    for engine in ENGINES:
        assert all(rank == {"skipped": True, "scale": 512.0} for rank in _our_row(runs, engine, "k3"))


def test_k4_python_numbers_of_mirrored_variables(runs: Any) -> None:
    seen = _stock_row(runs, "mirrored", "k4")
    assert_broken(_has_error(seen, "TypeError"), "K4", seen)
    for engine in ENGINES:
        assert all(rank == [2.0, 2] for rank in _our_row(runs, engine, "k4"))


@pytest.mark.cases("strings")
def test_k5_columns_of_strings(runs: Any) -> None:
    seen = _stock_case(runs, "strings")
    assert_broken(seen.error is not None, "K5", seen.values)
    _assert_exact(runs, "strings")


@pytest.mark.cases("gan")
def test_k6_a_model_without_call(runs: Any) -> None:
    seen = _stock_case(runs, "gan")
    assert_broken("Unable to automatically build the model" in (seen.error or ""), "K6", seen.error)
    _assert_exact(runs, "gan")


@pytest.mark.cases("own_train_step")
def test_k7_a_loss_logged_by_an_own_train_step(runs: Any) -> None:
    seen = _stock_case(runs, "own_train_step")
    assert_broken(seen.error is None and _worst(runs, "own_train_step", seen) > 0.1, "K7", seen.values)
    _assert_exact(runs, "own_train_step")


def test_c1_layers_with_a_state_cannot_be_trained_under_central_storage(runs: Any) -> None:
    seen = _stock_row(runs, "central_storage", "c1")[0]["value"]
    refused = "You must specify an aggregation method to update a AggregatingVariable"
    assert_broken(all(refused in seen[layer] for layer in ("BatchNormalization", "Dropout")), "C1", seen)
    assert _our_row(runs, "central_storage", "c1") == [{"BatchNormalization": "trained", "Dropout": "trained"}]


def test_c2_metrics_are_wrong_under_central_storage(runs: Any) -> None:
    def off(seen: Any) -> list[float]:
        return [abs(seen["evaluate"][name] - seen["true"][name]) for name in ("loss", "accuracy")]

    seen = _stock_row(runs, "central_storage", "c2")[0]["value"]
    assert_broken(max(off(seen)) > 0.01, "C2", seen)
    (seen,) = _our_row(runs, "central_storage", "c2")
    assert max(off(seen)) < 1e-6


def test_k8_fewer_rows_than_replicas(runs: Any) -> None:
    seen = _stock_row(runs, "mirrored", "k8")
    assert_broken(_has_error(seen, "Shape must be rank", "ValueError"), "K8", seen)
    for engine in ENGINES:
        assert all(shape == [1, 1] for shape in _our_row(runs, engine, "k8"))


def test_k9_dropout_is_the_same_on_every_replica(runs: Any) -> None:
    first, second = _stock_row(runs, "mirrored", "k9")[0]["value"]
    assert_broken(first == second, "K9", [first, second])
    for engine in ENGINES:
        masks = [mask for rank in _our_row(runs, engine, "k9") for mask in rank]
        assert len(masks) == 2 and masks[0] != masks[1]
        assert all(set(mask) == {0.0, 2.0} for mask in masks)
