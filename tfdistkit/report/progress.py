"""How far a process of a job came: the steps of its optimizer, for who asks which rank left too early."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

from tfdistkit import env

FILE_NAME = "steps"


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
