"""The private names that we use exist, and Keras is unchanged where no strategy of ours is used."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from parity import engines

pytestmark = pytest.mark.tensorflow

_SCRIPT = str(Path(__file__).with_name("run_untouched.py"))


def _seams() -> Any:
    from tfdistkit.keras_adapter import private_lookup

    return private_lookup


def test_every_seam_is_where_it_was() -> None:
    seams = _seams()
    assert len(seams.SEAMS) > 20
    for key in seams.SEAMS:
        owner, name, found = seams.resolve(key)
        assert getattr(owner, name) is found


def test_every_seam_says_why() -> None:
    assert all(seam.why and ":" in seam.where for seam in _seams().SEAMS.values())


def test_a_name_that_went_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras.src.backend.tensorflow.trainer as trainer

    seams = _seams()
    monkeypatch.delattr(trainer, "reduce_per_replica")
    with pytest.raises(seams.UnsupportedError) as caught:
        seams.resolve("reduce_per_replica")
    assert "moved `keras.src.backend.tensorflow.trainer:reduce_per_replica`: it is gone" in str(caught.value)
    assert seams.SEAMS["reduce_per_replica"].why in str(caught.value)


def test_a_parameter_that_went_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras.src.backend.tensorflow.trainer as trainer

    seams = _seams()
    monkeypatch.setattr(trainer, "reduce_per_replica", lambda values, strategy: values)
    with pytest.raises(seams.UnsupportedError, match="reduce_per_replica`: it no longer takes reduction"):
        seams.resolve("reduce_per_replica")


def test_parameters_in_another_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras.src.backend.tensorflow.trainer as trainer

    seams = _seams()
    monkeypatch.setattr(trainer, "reduce_per_replica", lambda strategy, values, reduction: values)
    with pytest.raises(seams.UnsupportedError, match="it takes its parameters in another order: strategy, values"):
        seams.resolve("reduce_per_replica")


def test_every_attribute_is_where_it_was() -> None:
    names = _seams()
    for one in (*names.ATTRIBUTES, *names.OVERRIDES):
        names.require_attributes(one)


def test_an_attribute_that_went_away_is_named() -> None:
    names = _seams()
    gone = names.Attributes(names.ATTRIBUTES[0].where, ("_num_batches", "_num_lots"), "a test")
    with pytest.raises(names.UnsupportedError, match="TFEpochIterator`: it has no _num_lots. .* needs it: a test"):
        names.require_attributes(gone)


def _canaries() -> Any:
    from tfdistkit.keras_adapter import canaries

    return canaries


@pytest.mark.parametrize(
    "name",
    (
        "an_epoch_ends_with_its_data",
        "keras_counts_the_batches_of_an_epoch",
        "fit_makes_one_function_and_calls_it_for_each_step",
        "gradients_meet_once_and_after_they_were_clipped",
        "assignments_go_through_one_method",
        "the_loss_is_a_mean_weighted_by_rows",
    ),
)
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_canaries(name: str) -> None:
    canary = getattr(_canaries(), name)
    assert canary in _canaries().CANARIES and canary()


def test_canaries_leave_no_trace() -> None:
    import keras

    def names_and_numbers() -> tuple[str, float]:
        return keras.layers.Dense(1).name, float(keras.random.uniform((), seed=keras.random.SeedGenerator()))

    found = []
    for canaries in ((), _canaries().CANARIES):
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        for canary in canaries:
            canary()
        found.append(names_and_numbers())
    assert found[0] == found[1]


def test_another_behaviour_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from keras.src.trainers.epoch_iterator import EpochIterator

    canaries = _canaries()
    # As in a version that no longer asks the iterator where an epoch ends.
    monkeypatch.setattr(EpochIterator, "catch_stop_iteration", lambda iterator: contextlib.suppress(StopIteration))
    with pytest.raises(canaries.UnsupportedError, match="Keras notes how long data of unknown length is"):
        canaries.check_behaviour()


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the records of processes without tfdistkit, with it, and with one of its strategies."""
    folder = tmp_path_factory.mktemp("untouched")
    ways = ("without", "imported", "after_strategy")
    jobs = [engines.start(folder / way, [_SCRIPT, way, str(folder / f"{way}.json")]) for way in ways]
    try:
        for job in jobs:
            job.wait(240)
    finally:
        for job in jobs:
            job.kill()
    return {way: json.loads((folder / f"{way}.json").read_text()) for way in ways}


def test_the_import_changes_nothing_in_keras(untouched: dict[str, Any]) -> None:
    seen = SimpleNamespace(**untouched["imported"])
    assert seen.names > 2000 and seen.changed == []
    # The same record shows the hooks once a strategy of ours is made, so the test can fail.
    assert untouched["after_strategy"]["changed"]


def test_models_without_a_strategy_train_bit_for_bit_as_before(untouched: dict[str, Any]) -> None:
    for way in ("imported", "after_strategy"):
        assert untouched[way]["trained"] == untouched["without"]["trained"]
    assert len(untouched["without"]["trained"]) == 4
