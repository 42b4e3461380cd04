"""`BackupAndResume`: several `fit`s of a script with one folder, and several trainings or attempts that write it."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from interrupted_runs import Broken, in_arrays, light, run

from tfdistkit.callbacks import BackupAndResume
from tfdistkit.callbacks.backup import backup_folder
from tfdistkit.errors import UnsupportedError

pytestmark = pytest.mark.tensorflow


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forgets the `fit`s that have ended, as a new process does."""
    forget = lambda: monkeypatch.setattr(backup_folder, "_ended", {})  # noqa: E731
    forget()
    return forget


def _fits(folder: pathlib.Path, break_in: int | None = None) -> list[np.ndarray]:
    """Trains two models, one twice; may end in one of the `fit`s."""
    found, number = [], 0
    for seed in (1, 2):
        keras.utils.set_random_seed(seed)
        model = light()
        for _ in range(seed):
            number += 1
            callbacks: list[Any] = [BackupAndResume(folder, save_freq=1)]
            if number == break_in:
                callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=_break))
            model.fit(**in_arrays(), epochs=2, verbose=0, callbacks=callbacks)
            found.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    return found


def _break(*_: Any) -> None:
    raise Broken


@pytest.mark.parametrize("break_in", (1, 2, 3))
def test_each_fit_of_a_script_has_its_backup(
    tmp_path: pathlib.Path, new_process: Callable[[], None], break_in: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _fits(tmp_path / "undisturbed")
    new_process()
    with pytest.raises(Broken):
        _fits(tmp_path / "folder", break_in)
    new_process()
    np.testing.assert_array_equal(_fits(tmp_path / "folder"), expected)
    assert not (tmp_path / "folder").exists()
    assert ("`fit` number 1 of this script trains again" in caplog.text) == (break_in > 1)


def _members(folder: pathlib.Path, done: dict[int, np.ndarray], break_in: int | None = None) -> None:
    """Trains an ensemble, without the members that are done; may end in one of the others."""
    for member in (set(range(6)) - set(done)) if break_in is None else range(6):
        keras.utils.set_random_seed(member)
        model = light()
        callbacks: list[Any] = [BackupAndResume(folder, save_freq=1)]
        if member == break_in:
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=_break))
        model.fit(**in_arrays(), epochs=2, verbose=0, callbacks=callbacks)
        done[member] = np.concatenate([w.ravel() for w in model.get_weights()])


def test_a_script_that_skips_what_it_has_trained(tmp_path: pathlib.Path, new_process: Callable[[], None]) -> None:
    expected: dict[int, np.ndarray] = {}
    _members(tmp_path / "undisturbed", expected)
    new_process()
    done: dict[int, np.ndarray] = {}
    with pytest.raises(Broken):
        _members(tmp_path / "folder", done, break_in=2)
    assert list(done) == [0, 1] and (tmp_path / "folder/fit-3/training.backup").exists()
    new_process()
    _members(tmp_path / "folder", done)
    for member, weights in expected.items():
        np.testing.assert_array_equal(done[member], weights)
    assert not (tmp_path / "folder").exists()


def test_parts_of_the_data_with_equal_weights_are_told_apart(
    tmp_path: pathlib.Path, new_process: Callable[[], None]
) -> None:
    """Folds that begin with the same weights: the first one does not resume the third."""

    def folds(folder: pathlib.Path, break_in: int | None = None) -> list[np.ndarray]:
        found = []
        for fold in range(3):
            keras.utils.set_random_seed(1)
            model, data = light(), in_arrays()
            data = {**data, "x": np.roll(data["x"], fold, 0)}
            callbacks: list[Any] = [BackupAndResume(folder, save_freq=1)]
            if fold == break_in:
                callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=_break))
            model.fit(**data, epochs=2, verbose=0, callbacks=callbacks)
            found.append(np.concatenate([w.ravel() for w in model.get_weights()]))
        return found

    expected = folds(tmp_path / "undisturbed")
    new_process()
    with pytest.raises(Broken):
        folds(tmp_path / "folder", break_in=2)
    new_process()
    np.testing.assert_array_equal(folds(tmp_path / "folder"), expected)


def test_the_backup_of_another_seed_is_no_backup_of_a_later_fit(
    tmp_path: pathlib.Path, new_process: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The member that was interrupted is left out after the restart; another one is the third `fit` then."""
    done: dict[int, np.ndarray] = {}
    with pytest.raises(Broken):
        _members(tmp_path / "folder", done, break_in=2)
    new_process()
    done[2] = np.zeros(0)
    _members(tmp_path / "folder", done)
    expected: dict[int, np.ndarray] = {}
    new_process()
    _members(tmp_path / "undisturbed", expected)
    for member in (3, 4, 5):
        np.testing.assert_array_equal(done[member], expected[member])
    assert "is of a training with another seed (2; this one has 5)" in caplog.text


def test_two_trainings_in_one_folder(tmp_path: pathlib.Path) -> None:
    def claim(batch: int, logs: Any = None) -> None:
        if batch == 3:
            backup_folder.BackupFolder(str(tmp_path), True).own()

    with pytest.raises(UnsupportedError, match="One training must write backups into a folder"):
        run(light, in_arrays, lambda: [keras.callbacks.LambdaCallback(on_train_batch_end=claim)], tmp_path)


def test_an_attempt_of_a_job_takes_the_folder_of_an_earlier_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier attempt may run on where the launcher cannot reach its host, and write before or after the later."""
    monkeypatch.setenv("TFDISTKIT_JOB_ID", "job.0")
    monkeypatch.setenv("TFDISTKIT_ATTEMPT", "1")
    earlier = backup_folder.BackupFolder(str(tmp_path), True)
    monkeypatch.setenv("TFDISTKIT_JOB_ID", "job.1")  # on another host
    monkeypatch.setenv("TFDISTKIT_ATTEMPT", "2")
    later = backup_folder.BackupFolder(str(tmp_path), True)
    earlier.own()
    later.own()
    (tmp_path / "training.backup").touch()
    with pytest.raises(UnsupportedError, match="One training must write"):
        earlier.own()
    earlier.end(removes=True, is_writer=True)
    assert (tmp_path / "training.backup").exists()
    later.own()
    later.end(removes=True, is_writer=True)
    assert not tmp_path.exists()
