"""Records the progress of a process: the steps of its optimizer, and the mark of a backup."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfdistkit import env

FILE_NAME = "steps"
COMMUNICATION_FILE = "communication"
_COMMUNICATION = ("epoch", "bytes_per_step", "bytes_ratio", "steps_per_sync", "seconds_per_sync")

# A process that exits on SIGUSR1 leaves this file after its backup. Without the file, it got the signal while it was
# starting: a job that is restarted after that would never make progress.
BACKUP_FILE = "backup"


def leave_backup_mark() -> None:
    """Leaves the mark of a backup in this process's folder, if it has one."""
    folder = env.text(env.TASK_DIR)
    if folder is not None:
        with contextlib.suppress(OSError):
            Path(folder, BACKUP_FILE).touch()


def leave_steps() -> None:
    """Writes the steps of this process into its folder, if it has one and has trained."""
    folder, steps = env.text(env.TASK_DIR), steps_taken()
    if folder is not None and steps is not None:
        with contextlib.suppress(OSError):
            Path(folder, FILE_NAME).write_text(str(steps), encoding="utf-8")


def read_steps(folder: Path) -> int | None:
    """Returns the steps in the folder of a process; None without them.

    Args:
        folder: The folder.
    """
    try:
        return int((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def leave_communication(facts: Mapping[str, float]) -> None:
    """Writes the communication of this process into its folder, if it has one, for the events of the job.

    Args:
        facts: Numbers by name.
    """
    folder = env.text(env.TASK_DIR)
    if folder is not None:
        path = Path(folder, COMMUNICATION_FILE)
        with contextlib.suppress(OSError):
            # Atomically: the launcher may read it at any time.
            path.with_suffix(".new").write_text(json.dumps(dict(facts)), encoding="utf-8")
            os.replace(path.with_suffix(".new"), path)


def read_communication(folder: Path) -> dict[str, Any]:
    """Returns the last communication record of a process; an empty dict without one.

    Args:
        folder: The folder of the process.
    """
    try:
        facts = json.loads((folder / COMMUNICATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(facts, dict):
        return {}
    numbers = {name: facts[name] for name in _COMMUNICATION if type(facts.get(name)) in (int, float)}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def steps_taken() -> int | None:
    """Returns the largest number of steps of the optimizers in this process; None without one."""
    base = getattr(sys.modules.get("keras.optimizers"), "Optimizer", None)
    if not isinstance(base, type):
        return None
    taken = []
    for one in gc.get_objects():
        # Reads the type only: attributes of lazy modules would import them.
        if issubclass(type(one), base):
            with contextlib.suppress(Exception):  # variables may be unreadable in a broken job
                taken.append(int(one.iterations.numpy()))
    return max(taken, default=None)
