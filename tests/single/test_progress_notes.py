"""Progress notes: what a process notes, and what another one reads of it at any time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdistkit import env
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import FILE_NAME, SIZE_BYTES, Phase, parse_notes, read_notes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a process, into which this one writes its notes."""
    monkeypatch.setenv(env.TASK_DIR, str(tmp_path))
    monkeypatch.setattr(notes, "own", notes.own)
    notes.begin()
    yield tmp_path


def test_notes_are_readable_at_any_time(folder: Path) -> None:
    begun = read_notes(folder)
    assert begun is not None and begun.pid == os.getpid() and not begun.has_begun
    step = notes.noting_steps(lambda words: words.append(read_notes(folder)), 4)
    seen: list[object] = []
    notes.own.begin_epoch(2)
    step(seen)
    step(seen)
    inside, now = seen[1], read_notes(folder)
    assert inside.phase is Phase.STEP and inside.steps == 4 and inside.epoch == 2  # type: ignore[attr-defined]
    assert now is not None and now.phase is Phase.BETWEEN and now.steps == 8 and now.has_begun
    rate = now.steps_per_s(now.since + 2)
    assert rate is not None and 1 < rate <= 2.1  # the 4 steps after the first execution


def test_collectives(folder: Path) -> None:
    notes.own.begin_operation(b"sum of float32 [3]")
    inside = read_notes(folder)
    assert inside is not None and inside.is_in_collective and inside.call == "sum of float32 [3]"
    notes.own.end_operation()
    notes.own.begin_operation(b"min " + b"x" * 200)
    notes.own.end_operation()
    after = read_notes(folder)
    assert after is not None and not after.is_in_collective and after.begun == 2 and len(after.call) == 96
    assert after.changes > inside.changes


def test_a_failed_step_is_over(folder: Path) -> None:
    def fail(_: object) -> None:
        raise StopIteration

    with pytest.raises(StopIteration):
        notes.noting_steps(fail, 1)(None)
    found = read_notes(folder)
    assert found is not None and found.phase is Phase.BETWEEN and found.steps == 0


def test_evaluations_and_saves_return_to_the_phase_before(folder: Path) -> None:
    notes.own.enter(Phase.BETWEEN)
    with notes.noting(Phase.SAVE):
        assert read_notes(folder).phase is Phase.SAVE  # type: ignore[union-attr]
    notes.noting_steps(lambda _: None, None)(None)
    found = read_notes(folder)
    assert found is not None and (found.phase, found.evaluated, found.steps) == (Phase.BETWEEN, 1, 0)


def test_files_are_private_and_replaced(folder: Path) -> None:
    path = folder / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.stat().st_ino
    notes.begin()  # as the next process with this folder: one that still runs keeps its own file
    assert path.stat().st_ino != before


@pytest.mark.parametrize("data", [b"", b"x" * 10, b"\0" * SIZE_BYTES, b"\xff" * SIZE_BYTES])
def test_what_is_no_notes(data: bytes) -> None:
    assert parse_notes(data) is None


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    code = "from tfdistkit.report.hangs import notes; notes.begin(); notes.noting_steps(print, 1)('ran')"
    environment = {name: value for name, value in os.environ.items() if name != env.TASK_DIR}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ran\n" and not list(tmp_path.iterdir()), done.stderr


@pytest.mark.tensorflow
def test_fit_notes_steps_epochs_and_evaluations(folder: Path) -> None:
    import keras
    import numpy as np

    import tfdistkit

    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            seen.append(read_notes(folder))

    with tfdistkit.strategy("one_device").scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2)
    x, y = np.ones((16, 2)), np.ones((16, 1))
    model.fit(x, y, batch_size=4, epochs=5, initial_epoch=3, verbose=0, validation_data=(x, y), callbacks=[Look()])
    assert [(one.epoch, one.steps, one.phase) for one in seen] == [
        (3, 2, Phase.BETWEEN), (3, 4, Phase.BETWEEN), (4, 6, Phase.BETWEEN), (4, 8, Phase.BETWEEN),
    ]  # fmt: skip
    last = read_notes(folder)
    assert last is not None and (last.phase, last.epoch, last.evaluated) == (Phase.OUTSIDE, 4, 4)
