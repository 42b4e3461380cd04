"""The crash record: what a worker writes about its own unhandled exception, and the launcher reads.

It is `error.json` in the worker's own folder in the run folder. Its time is the moment of the
exception, before the interpreter shuts down, so the launcher can tell which worker failed first even when
another one was quicker to end.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "error.json"


@dataclass(frozen=True)
class CrashRecord:
    """One worker's unhandled exception, or its `sys.exit` with a code other than 0.

    Args:
        rank: The worker's number among those of its role.
        host: The machine.
        pid: The process on that machine.
        time: Seconds since the epoch, when the exception left the script.
        exit_code: What the process ends with, 1 to 255.
        type: The name of the exception's class.
        message: Its text.
        traceback: As Python prints it, the script's frames only; those of libraries are folded.
        kinds: Its class and those above it, with their modules, and those of the exceptions it was raised from.
        steps: How many steps its optimizer had taken; None if there is none.
        full_traceback: With the frames of libraries.
    """

    rank: int
    host: str
    pid: int
    time: float
    exit_code: int
    type: str
    message: str
    traceback: str
    kinds: tuple[str, ...] = ()
    steps: int | None = None
    full_traceback: str = ""


def kinds_of(error: BaseException) -> tuple[str, ...]:
    """Returns the classes of an exception, and of those that it was raised `from`, as `module.Class`.

    Args:
        error: The exception.
    """
    found: dict[str, None] = {}
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is one for one in seen):
        seen.append(cause)
        found.update(dict.fromkeys(f"{one.__module__}.{one.__qualname__}" for one in type(cause).__mro__))
        cause = cause.__cause__
    return tuple(found)


def write_crash(folder: Path, record: CrashRecord) -> None:
    """Writes a crash record under a temporary name and renames it: a reader sees all of it or nothing."""
    unfinished = folder / f".{FILE_NAME}.{record.pid}"
    unfinished.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    os.replace(unfinished, folder / FILE_NAME)


def read_crash(folder: Path) -> CrashRecord | None:
    """Returns the crash record in a worker's folder, or None when there is none that can be read."""
    try:
        fields = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        return CrashRecord(**{**fields, "kinds": tuple(fields.get("kinds", ()))})
    except (OSError, ValueError, TypeError):
        return None
