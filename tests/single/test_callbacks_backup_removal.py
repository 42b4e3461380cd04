"""Ranks remove the backup at the end of training, while the chief may still write its last one."""

from __future__ import annotations

from pathlib import Path

from tfdistkit.atomic_files import whole_file
from tfdistkit.callbacks.backup.generations import remove_backups


def test_a_faster_rank_keeps_the_folder_of_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "backup/training.backup"
    path.parent.mkdir()
    remove_backups(str(path), with_folder=False)
    with whole_file(str(path)) as partial:
        remove_backups(str(path), with_folder=False)
        Path(partial).write_text("the last one")
    assert path.read_text() == "the last one"
    remove_backups(str(path), with_folder=True)
    assert not path.parent.exists()
