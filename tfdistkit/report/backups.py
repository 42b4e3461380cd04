"""The mark of a backup: a process that ends because it was told to (SIGUSR1) leaves it when it has made a backup.

Without it, whoever started the process could not tell it from one that was told too early, while it was starting, and
that would never come further if it were started again and again.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from tfdistkit import env

FILE_NAME = "backup"


def leave_backup_mark() -> None:
    """Leaves the mark in this process's folder, if a launcher gave it one."""
    folder = env.text(env.TASK_DIR)
    if folder is not None:
        with contextlib.suppress(OSError):
            Path(folder, FILE_NAME).touch()
