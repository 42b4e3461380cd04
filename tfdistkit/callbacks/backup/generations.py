"""Selects one of the two newest backups for all ranks, and reports a damaged one."""

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
        content: The content given to `write_backup`.
        keeps_newest: Whether the newest file of this rank may become the previous backup: False if it is damaged.
    """

    content: dict[str, Any]
    keeps_newest: bool


@dataclass(frozen=True)
class _Generation:
    """The backup file of one generation on this rank; `damage` explains why it is unreadable."""

    state: int = _MISSING
    data: bytes = b""
    content: dict[str, Any] | None = None
    written_ns: int = 0
    damage: str = ""


def newest_backup(path: str, ranks: Ranks) -> Backup | None:
    """Returns the newest readable backup of all ranks; all ranks call it, and get the same.

    Args:
        path: The newest backup. The previous one lies beside it.
        ranks: The process group.

    Returns:
        The backup; None if no rank has a backup file.

    Raises:
        UnsupportedError: on all ranks, if there are backup files, but none is readable.
    """
    paths = (path, previous_of(path))
    own = [_read(paths[0])]
    # The previous backup is read only if it is needed.
    own.append(_read(paths[1]) if own[0].state != _GOOD else _Generation())
    row = np.array([value for one in own for value in (one.state, one.written_ns)], np.int64)
    table = row[None] if ranks.is_single else ranks.gather(row)
    states, written = table[:, ::2], table[:, 1::2]
    damage = _shared_damage(own, states, ranks)
    if not (states == _GOOD).any():
        if not (states == _DAMAGED).any():
            return None
        raise _none_readable(paths, states, damage)
    # Each rank's newest readable backup; among the ranks, the newest of these.
    root, generation = max(
        ((rank, int(np.argmax(row == _GOOD))) for rank, row in enumerate(states) if (row == _GOOD).any()),
        key=lambda candidate: (int(written[candidate]), -candidate[0]),
    )
    if ranks.rank == 0 and (generation or (states == _DAMAGED).any()):
        _warn(paths, states, damage, root, generation)
    content = own[generation].content if ranks.rank == root else None
    if not ranks.is_single:
        data = ranks.broadcast(own[generation].data, root)
        content = content or read_backup(data, paths[generation])
    assert content is not None
    return Backup(content, own[0].state != _DAMAGED)


def remove_backups(path: str, with_folder: bool) -> None:
    """Removes both backups, the older one first: a run killed in between resumes from the newest.

    Args:
        path: The newest backup.
        with_folder: Whether to remove their folder too, if it is empty. Only for the rank that writes: other ranks
            may call this while it still writes its last backup.
    """
    for one in (previous_of(path), path):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.remove(one)
    if with_folder:
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))  # Removes only an empty folder.


def _read(path: str) -> _Generation:
    try:
        with open(path, "rb") as file:
            data, written_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
        content = read_backup(data, path)
    except (FileNotFoundError, NotADirectoryError):
        return _Generation()
    except (OSError, UnsupportedError) as error:
        return _Generation(_DAMAGED, damage=str(error).splitlines()[0])
    return _Generation(_GOOD, data, content, written_ns)


def _shared_damage(own: list[_Generation], states: np.ndarray, ranks: Ranks) -> str:
    """Returns the damage on the first rank with a damaged backup."""
    damage = "; ".join(one.damage for one in own if one.damage)
    damaged = np.flatnonzero((states == _DAMAGED).any(axis=1))
    if ranks.is_single or not len(damaged):
        return damage
    return ranks.broadcast(damage.encode(), int(damaged[0])).decode()


def _damaged(paths: tuple[str, str], states: np.ndarray) -> str:
    where = [
        f"{os.path.abspath(paths[generation])!r}" + (f" on rank {rank}" if len(states) > 1 else "")
        for rank, generation in np.argwhere(states == _DAMAGED)
    ]
    return ", ".join(where)


def _warn(paths: tuple[str, str], states: np.ndarray, damage: str, root: int, generation: int) -> None:
    used = f"{os.path.abspath(paths[generation])!r}" + (f" of rank {root}" if len(states) > 1 else "")
    if (states == _DAMAGED).any():
        unreadable = _damaged(paths, states)
        _LOG.warning("BackupAndResume resumes from %s, because %s cannot be read: %s", used, unreadable, damage)
    else:
        _LOG.warning(
            "BackupAndResume resumes from %s, the previous backup: %r is missing. Remove both to train from "
            "the beginning.", used, os.path.abspath(paths[0]),
        )  # fmt: skip


def _none_readable(paths: tuple[str, str], states: np.ndarray, damage: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "No backup of this training is readable.",
            received=f"{_damaged(paths, states)}: {damage}",
            expected="a file as it was written",
            do=f"Restore a copy of it in {os.path.dirname(os.path.abspath(paths[0]))!r}; or remove that folder to "
            "train from the beginning.",
        )
    )
