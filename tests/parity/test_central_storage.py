"""`central_storage` stores each variable once, computes on all devices, and no replica reads what another writes.

Its exactness is tested with that of the other strategies (test_exactness.py). One process runs all parts.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from parity import engines

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of each part of run_central.py."""
    folder = tmp_path_factory.mktemp("central")
    engines.start(folder, ["-m", "parity.run_central", str(folder)]).wait(600)
    return dict(json.loads((folder / "seen.json").read_text()))


def _of(seen: dict[str, Any], part: str) -> Any:
    assert "error" not in seen[part], seen[part]["error"]
    return seen[part]


def test_each_trainable_variable_and_slot_exists_once(seen: dict[str, Any]) -> None:
    stored = _of(seen, "stored")
    assert stored["parameter_devices"] == ["CPU:0"]
    assert len(stored["trainable"]) == 6
    # Two scalars of the optimizer, four of LossScaleOptimizer, four slots for each variable.
    assert len(stored["optimizer"]) == 2 + 4 + 4 * 6
    for kind in ("trainable", "optimizer"):
        assert all(devices == ["CPU:0"] for devices in stored[kind].values()), stored[kind]
    # Devices of the variables of the first kernel's shape: the kernel and its four slots, in all copies.
    assert stored["live"] == {"central_storage": {"CPU:0": 5}, "mirrored": {"CPU:1": 5, "CPU:2": 5}}


def test_state_of_replicas_is_on_their_devices(seen: dict[str, Any]) -> None:
    state = _of(seen, "stored")["state"]
    assert len(state) == 3 and all(devices == ["CPU:1", "CPU:2"] for devices in state.values()), state


def test_the_variables_of_all_optimizers_are_central(seen: dict[str, Any]) -> None:
    found = _of(seen, "optimizers")
    assert {"Adafactor", "Adam", "Ftrl", "Lion", "Nadam", "SGD"} <= set(found)
    assert not any(found.values()), found


def test_all_replicas_compute_and_the_device_of_the_variables_updates(seen: dict[str, Any]) -> None:
    computed = _of(seen, "computed")
    products = computed["MatMul"]
    assert set(products) == {"CPU:1", "CPU:2"} and products["CPU:1"] == products["CPU:2"] >= 4, computed
    assert computed["AssignSubVariable"] == {"CPU:0": 6}
    assert seen["computed_eagerly"] == ["CPU:1", "CPU:2"]


def test_results_do_not_depend_on_which_replica_is_late(seen: dict[str, Any]) -> None:
    races = _of(seen, "races")
    assert races["different"] == 1, races
    limits = {"weights": 1e-6, "slots": 1e-5, "logs": 1e-6}
    assert all(races["far"][name] <= limit for name, limit in limits.items()), races


def test_a_write_of_the_replicas_is_aggregated(seen: dict[str, Any]) -> None:
    """Starts at 1, and replica r adds 10 * (r + 1) twice; compares the value on both replicas and the stored one."""
    sums = {"NONE": 10.0, "ONLY_FIRST_REPLICA": 10.0, "SUM": 30.0, "MEAN": 15.0}
    written = _of(seen, "written")
    assert written == {
        f"{name} {how}": [1.0 + times * added] * 3
        for name, added in sums.items()
        for times, how in ((1, "graph"), (2, "eager"))
    }


def test_an_update_where_replicas_cannot_wait_is_refused(seen: dict[str, Any]) -> None:
    refused = _of(seen, "inner")
    assert len(refused["errors"]) == 3
    for error in refused["errors"]:
        assert "UnsupportedError: A step must not update variables in a branch, in a loop or in a tf.function" in error
        assert "Expected: every update in the step itself" in error and '"mirrored"' in error
    assert refused["variable"] == 1.0


def test_loads_under_one_device_and_with_one_computing_device(seen: dict[str, Any]) -> None:
    for name, device in (("one_device", "CPU:0"), ("central_storage", "CPU:2")):
        loaded = _of(seen, "saved")[name]
        assert loaded["equal"] and loaded["predicts"] < 1e-6, loaded
        assert loaded["devices"] == [device]
        assert 0.0 < loaded["loss"] < 100.0
