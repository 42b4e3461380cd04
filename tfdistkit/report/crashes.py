"""Writes and reads crash records: the unhandled exception of a worker, for the launcher.

The record is `error.json` in the worker's folder in the run folder. Its time is that of the exception, before the
interpreter shuts down, so the launcher finds the worker that failed first even if another one exited sooner.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_NAME = "error.json"


@dataclass(frozen=True)
class CrashRecord:
    """Describes a worker's unhandled exception, or its `sys.exit` with a code other than 0.

    Args:
        rank: The index of the worker within its role.
        host: The machine.
        pid: The process id on that machine.
        time: Seconds since the epoch, when the exception left the script.
        exit_code: The exit code of the process, 1 to 255.
        type: The name of the exception's class.
        message: Its text.
        traceback: The traceback as Python prints it, with library frames folded.
        kinds: Its class and base classes as `module.Class`, and those of its causes.
        steps: The steps of its optimizer; None without one.
        full_traceback: The traceback with the frames of libraries.
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
    """Returns the classes of an exception and of its causes (`raise ... from`) as `module.Class`.

    Args:
        error: The exception.
    """
    found: dict[str, None] = {}
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and not any(cause is one for one in chain):
        chain.append(cause)
        found.update(dict.fromkeys(f"{one.__module__}.{one.__qualname__}" for one in type(cause).__mro__))
        cause = cause.__cause__
    return tuple(found)


def write_crash(folder: Path, record: CrashRecord) -> None:
    """Writes a crash record atomically, by renaming a temporary file."""
    unfinished = folder / f".{FILE_NAME}.{record.pid}"
    unfinished.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    os.replace(unfinished, folder / FILE_NAME)


def read_crash(folder: Path) -> CrashRecord | None:
    """Returns the crash record in a worker's folder, or None without a readable one."""
    try:
        fields = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        return CrashRecord(**{**fields, "kinds": tuple(fields.get("kinds", ()))})
    except (OSError, ValueError, TypeError):
        return None
