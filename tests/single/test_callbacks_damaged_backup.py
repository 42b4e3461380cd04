"""Damaged or missing backups: training resumes from the previous one, and never restarts silently."""

from __future__ import annotations

import errno
import io
import json
import pathlib
import zipfile
from typing import Any

import pytest
from interrupted_runs import assert_same, in_arrays, light, no_callbacks, refused, run

pytestmark = pytest.mark.tensorflow


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip_a_bit(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


def of_something_else(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("state.json", json.dumps({"form": 1, "content": {"dict": [["a", 1]]}, "arrays": []}))
    return file.getvalue()


DAMAGE = {"cut": cut, "bit": flip_a_bit, "empty": lambda _: b"", "something else": of_something_else}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_backup_falls_back_to_the_previous_one(
    tmp_path: pathlib.Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(light, in_arrays, no_callbacks, None)
    assert expected is not None and run(light, in_arrays, no_callbacks, tmp_path, 4) is None  # backups after 2 and 3
    newest, previous = tmp_path / "training.backup", tmp_path / "training.backup.previous"
    newest.write_bytes(DAMAGE[damage](newest.read_bytes()))
    kept = previous.read_bytes()
    assert run(light, in_arrays, no_callbacks, tmp_path, 1) is None
    assert previous.read_bytes() == kept
    messages = "\n".join(caplog.messages)
    assert f"resumes from '{previous}', because '{newest}' cannot be read" in messages
    found = run(light, in_arrays, no_callbacks, tmp_path)
    assert found is not None and found["batches"][0] == (0, 2)
    assert_same(found, expected)
    assert list(tmp_path.parent.glob(f"{tmp_path.name}/*")) == []


def test_unreadable_backups_are_an_error(tmp_path: pathlib.Path) -> None:
    assert run(light, in_arrays, no_callbacks, tmp_path, 4) is None
    newest, previous = tmp_path / "training.backup", tmp_path / "training.backup.previous"
    newest.write_bytes(b"")
    previous.write_bytes(b"")
    message = refused(tmp_path, in_arrays)
    assert "No backup of this training is readable" in message and str(newest) in message and str(previous) in message
    newest.unlink()
    newest.mkdir()
    assert "No backup of this training is readable" in refused(tmp_path, in_arrays)


def test_the_previous_backup_is_used_if_the_newest_is_missing(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(light, in_arrays, no_callbacks, tmp_path, 4) is None
    (tmp_path / "training.backup").unlink()
    found = run(light, in_arrays, no_callbacks, tmp_path)
    assert found is not None and found["batches"][0] == (0, 2)
    assert "training.backup' is missing. Remove both to train from the beginning" in caplog.text


def test_a_full_disk_keeps_existing_backups(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(light, in_arrays, no_callbacks, None)
    assert expected is not None and run(light, in_arrays, no_callbacks, tmp_path, 4) is None
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write, left = zipfile.ZipFile.writestr, [1]

    def until_full(*args: Any, **kwargs: Any) -> None:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        write(*args, **kwargs)

    monkeypatch.setattr(zipfile.ZipFile, "writestr", until_full)
    with pytest.raises(OSError, match="The backup could not be written"):
        run(light, in_arrays, no_callbacks, tmp_path, save_freq=2)
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == set(files)
    found = run(light, in_arrays, no_callbacks, tmp_path)
    assert found is not None
    assert_same(found, expected)
