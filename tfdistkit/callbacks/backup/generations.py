"""The two newest backups of a training: which one all ranks go on with, and what is wrong with the other."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdistkit.callbacks.backup.backup_file import previous_of, read_backup
from tfdistkit.callbacks.process_group import Ranks
from tfdistkit.errors import UnsupportedError, explain

_LOG = logging.getLogger(__name__)

_MISSING, _GOOD, _DAMAGED = range(3)


@dataclass(frozen=True)
class Backup:
    """A backup that was read.

    Args:
        content: What `write_backup` was given.
        keeps_newest: Whether the newest file of this rank may become the one before: not if it is damaged.
    """

    content: dict[str, Any]
    keeps_newest: bool


@dataclass(frozen=True)
class _Generation:
    """What a rank has of a generation: `wrong` says why it cannot be used."""

    state: int = _MISSING
    data: bytes = b""
    content: dict[str, Any] | None = None
    written_ns: int = 0
    wrong: str = ""


def newest_backup(path: str, ranks: Ranks) -> Backup | None:
    """Returns the newest backup that a rank can read; all ranks call it, and get the same.

    Args:
        path: The file of the newest generation. The one before lies beside it.
        ranks: The ranks.

    Returns:
        The backup; None if no rank has a file of one.

    Raises:
        UnsupportedError: on all ranks, if there are files, and none can be read.
    """
    paths = (path, previous_of(path))
    own = [_look_at(paths[0])]
    # The one before is read only where it is needed.
    own.append(_look_at(paths[1]) if own[0].state != _GOOD else _Generation())
    row = np.array([value for one in own for value in (one.state, one.written_ns)], np.int64)
    table = row[None] if ranks.alone else ranks.gather(row)
    states, written = table[:, ::2], table[:, 1::2]
    damage = _shared_damage(own, states, ranks)
    if not (states == _GOOD).any():
        if not (states == _DAMAGED).any():
            return None
        raise _none_can_be_read(paths, states, damage)
    # Of a rank the newest that can be read, and of the ranks the one whose backup is the newest.
    root, generation = max(
        ((rank, int(np.argmax(row == _GOOD))) for rank, row in enumerate(states) if (row == _GOOD).any()),
        key=lambda place: (int(written[place]), -place[0]),
    )
    if ranks.rank == 0 and (generation or (states == _DAMAGED).any()):
        _tell(paths, states, damage, root, generation)
    content = own[generation].content if ranks.rank == root else None
    if not ranks.alone:
        data = ranks.share(own[generation].data, root)
        content = content or read_backup(data, paths[generation])
    assert content is not None
    return Backup(content, own[0].state != _DAMAGED)


def remove_backups(path: str, with_folder: bool) -> None:
    """Removes both generations, the older one first: who is killed in between goes on behind the newest.

    Args:
        path: The newest.
        with_folder: Whether their folder goes as well, if it is empty. Only the rank that writes may say so: others
            come here while it still writes its last backup.
    """
    for one in (previous_of(path), path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(one)
    if with_folder:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))  # Only an empty folder goes.


def _look_at(path: str) -> _Generation:
    try:
        with open(path, "rb") as file:
            data, written_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
        content = read_backup(data, path)
    except (FileNotFoundError, NotADirectoryError):
        return _Generation()
    except (OSError, UnsupportedError) as error:
        return _Generation(_DAMAGED, wrong=str(error).splitlines()[0])
    return _Generation(_GOOD, data, content, written_ns)


def _shared_damage(own: list[_Generation], states: np.ndarray, ranks: Ranks) -> str:
    """What is wrong on the first rank where something is."""
    damage = "; ".join(one.wrong for one in own if one.wrong)
    damaged = np.flatnonzero((states == _DAMAGED).any(axis=1))
    if ranks.alone or not len(damaged):
        return damage
    return ranks.share(damage.encode(), int(damaged[0])).decode()


def _damaged(paths: tuple[str, str], states: np.ndarray) -> str:
    where = [
        f"{os.path.abspath(paths[generation])!r}" + (f" on rank {rank}" if len(states) > 1 else "")
        for rank, generation in np.argwhere(states == _DAMAGED)
    ]
    return ", ".join(where)


def _tell(paths: tuple[str, str], states: np.ndarray, damage: str, root: int, generation: int) -> None:
    used = f"{os.path.abspath(paths[generation])!r}" + (f" of rank {root}" if len(states) > 1 else "")
    if (states == _DAMAGED).any():
        cannot = _damaged(paths, states)
        _LOG.warning("BackupAndResume goes on with %s, because %s cannot be read: %s", used, cannot, damage)
    else:
        _LOG.warning(
            "BackupAndResume goes on with %s, the backup before the newest: %r is missing. Remove both to train from "
            "the beginning.", used, os.path.abspath(paths[0]),
        )  # fmt: skip


def _none_can_be_read(paths: tuple[str, str], states: np.ndarray, damage: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "No backup of this training can be read, and it must not begin again without a word.",
            received=f"{_damaged(paths, states)}: {damage}",
            expected="the file as it was written",
            do=f"Put a copy of it in {os.path.dirname(os.path.abspath(paths[0]))!r}; or remove that folder to train "
            "from the beginning.",
        )
    )
