"""The event log of a run: `events.jsonl` in the run folder, one JSON object per line, appended as things happen."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tfdistkit.errors import OptionError, explain
from tfdistkit.report.private_files import make_folder, open_file

FILE_NAME = "events.jsonl"


class EventLog:
    """Appends events. Each is on disk, whole, when `add` returns, so the file tells the truth after a crash."""

    def __init__(self, run_dir: Path):
        """Opens the log, which no other job can open as long as this one does.

        Args:
            run_dir: The run folder.

        Raises:
            OptionError: if another job uses the folder, or it cannot be written to.
        """
        self._file = _open_alone(run_dir)
        os.ftruncate(self._file, 0)

    def add(self, event: str, **fields: Any) -> None:
        """Writes one event.

        Args:
            event: Its name, such as `worker_ended`.
            **fields: What belongs to it; anything that JSON can hold.
        """
        line = json.dumps({"time": round(time.time(), 6), "event": event, **fields}) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError:
            pass  # a full disk must not take the supervisor down: it still has workers to stop

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def require_unused(run_dir: Path) -> None:
    """Checks that no job uses a run folder, before anything in it is changed.

    Args:
        run_dir: The run folder; it may be missing.

    Raises:
        OptionError: if a job does, or the folder cannot be written to.
    """
    if (run_dir / FILE_NAME).exists():
        os.close(_open_alone(run_dir))


def _open_alone(run_dir: Path) -> int:
    try:
        make_folder(run_dir)
        file = open_file(run_dir / FILE_NAME, os.O_APPEND)
    except OSError as error:
        raise OptionError(
            explain("The folder for the logs cannot be used.", received=str(error), expected="a folder to write to")
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise OptionError(
            explain(
                "Another job that still runs writes its logs into this folder.",
                received=str(run_dir),
                expected="a folder of its own for each job",
                do="Name another folder (--log-dir), or wait until that job has ended.",
            )
        ) from None
    except OSError:
        pass  # a file system without locks
    return file


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the events of a run in order; lines that are none, such as one cut off by a crash, are left out."""
    events = []
    for line in (run_dir / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                events.append(event)
    return events
