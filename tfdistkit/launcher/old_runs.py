"""Remove the run folders of jobs that ended long ago from the folder for temporary files.

A folder is removed only if it has a run folder's name, belongs to this user, and holds an event log of this user that
no process has locked. Symbolic links are never followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.launcher.slurm.batch_script import BATCH_FILE, ENDED_FILE
from tfdistkit.report.events import FILE_NAME as EVENTS_FILE

# Keeps a failure over a weekend. Many systems clean such folders after ten days.
KEPT_DAYS = 7.0
_DAY_S = 86_400.0
# See `launcher.spec.temporary_run_dir`.
_NAME = re.compile(r"tfdistkit-\d+-[0-9a-f]{8}")
# Bounds the time that a start spends on removal.
_MOST_AT_ONCE = 20


@dataclass(frozen=True)
class OldRun:
    """The run folder of an ended job.

    Args:
        path: The folder.
        ended: The time of the job's last event, in seconds since the epoch.
    """

    path: Path
    ended: float


def remove_old_runs(
    folder: Path,
    older_than_days: float = KEPT_DAYS,
    most: int | None = _MOST_AT_ONCE,
    remove: Callable[[Path], object] = shutil.rmtree,
) -> list[OldRun]:
    """Removes the run folders of ended jobs.

    Args:
        folder: The parent folder of the run folders.
        older_than_days: The minimum age since the end of the job, in days.
        most: The maximum number to remove; None for all.
        remove: The function that removes a folder.

    Returns:
        The removed run folders. Those that cannot be read or removed are skipped.
    """
    removed: list[OldRun] = []
    for path in _candidates(folder):
        if most is not None and len(removed) >= most:
            break
        with contextlib.suppress(OSError), _held(path) as run:
            if run is not None and time.time() - run.ended >= older_than_days * _DAY_S:
                remove(path)
                removed.append(run)
    return removed


def _candidates(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            folders = (one.name for one in entries if one.is_dir(follow_symlinks=False))
            names = sorted(name for name in folders if _NAME.fullmatch(name))
    except OSError:
        return
    yield from (folder / name for name in names)


@contextlib.contextmanager
def _held(path: Path) -> Iterator[OldRun | None]:
    """Locks the event log of an ended job, so that no job can start in its folder; yields None for other folders."""
    with contextlib.ExitStack() as stack:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        # O_NONBLOCK: a named pipe must not block.
        log = os.open(EVENTS_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        stack.callback(os.close, log)
        found = os.fstat(log)
        is_ours = os.fstat(folder).st_uid == found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
        # SLURM runs a job even when no launcher follows it.
        is_queued = (path / BATCH_FILE).exists() and not (path / ENDED_FILE).exists()
        if not is_ours or is_queued:
            yield None
            return
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError while a job uses it
        yield OldRun(path, found.st_mtime)
