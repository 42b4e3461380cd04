"""How far a process of a job came: the steps of its optimizer, and the mark of a backup."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

from tfdistkit import env

FILE_NAME = "steps"

# A process that ends because it was told to (SIGUSR1) leaves this file when it has made a backup. Without it, whoever
# started the process could not tell it from one that was told too early, while it was starting, and that would never
# come further if it were started again and again.
BACKUP_FILE = "backup"


def leave_backup_mark() -> None:
    """Leaves the mark of a backup in this process's folder, if a launcher gave it one."""
    folder = env.text(env.TASK_DIR)
    if folder is not None:
        with contextlib.suppress(OSError):
            Path(folder, BACKUP_FILE).touch()


def leave_steps() -> None:
    """Writes the steps that this process has taken into its folder, if a launcher gave it one and it trained."""
    folder, steps = env.text(env.TASK_DIR), steps_taken()
    if folder is not None and steps is not None:
        with contextlib.suppress(OSError):
            Path(folder, FILE_NAME).write_text(str(steps), encoding="utf-8")


def read_steps(folder: Path) -> int | None:
    """Returns the steps that a process has written into its folder, None if it did not.

    Args:
        folder: Its folder.
    """
    try:
        return int((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def steps_taken() -> int | None:
    """Returns how many steps the optimizers of this process have taken, at most; None if there is none."""
    base = getattr(sys.modules.get("keras.src.optimizers.base_optimizer"), "BaseOptimizer", None)
    if not isinstance(base, type):
        return None
    taken = []
    for one in gc.get_objects():
        # The type alone: to ask an object would load modules that load themselves when asked.
        if issubclass(type(one), base):
            with contextlib.suppress(Exception):  # in a broken job nothing is sure
                taken.append(int(one.iterations.numpy()))
    return max(taken, default=None)
