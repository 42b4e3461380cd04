"""Ranks that end a training remove its backup, while the one that writes may still be at its last one."""

from __future__ import annotations

from pathlib import Path

from tfdistkit.callbacks.backup.generations import remove_backups
from tfdistkit.callbacks.checkpoints.atomic import whole_file


def test_a_rank_that_is_faster_does_not_take_the_folder_from_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "backup/training.backup"
    path.parent.mkdir()
    remove_backups(str(path), with_folder=False)
    with whole_file(str(path)) as partial:
        remove_backups(str(path), with_folder=False)
        Path(partial).write_text("the last one")
    assert path.read_text() == "the last one"
    remove_backups(str(path), with_folder=True)
    assert not path.parent.exists()
