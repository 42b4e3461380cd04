"""Writes and reads the event log of a run: `events.jsonl` in the run folder, one JSON object per line."""

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
from tfdistkit.report.private_files import make_folder, open_file, writing_logs

FILE_NAME = "events.jsonl"


class EventLog:
    """Appends events. Each is written completely when `add` returns, so the log survives a crash."""

    def __init__(self, run_dir: Path):
        """Opens and locks the log, so that no other job can open it.

        Args:
            run_dir: The run folder.

        Raises:
            OptionError: if another job uses the folder, or it is not writable.
        """
        self._file = _open_locked(run_dir)
        os.ftruncate(self._file, 0)

    def add(self, event: str, **fields: Any) -> None:
        """Writes one event.

        Args:
            event: The name, such as `worker_ended`.
            **fields: The fields of the event, as JSON values.
        """
        line = json.dumps({"time": round(time.time(), 6), "event": event, **fields}) + "\n"
        try:
            os.write(self._file, line.encode())
        except OSError:
            pass  # a full disk must not end the supervisor, which has workers to stop

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def require_unused(run_dir: Path) -> None:
    """Checks that no job uses a run folder, before the folder is changed.

    Args:
        run_dir: The run folder; it may be missing.

    Raises:
        OptionError: if a job uses it, or the folder is not writable.
    """
    if (run_dir / FILE_NAME).exists():
        os.close(_open_locked(run_dir))


def _open_locked(run_dir: Path) -> int:
    with writing_logs():
        make_folder(run_dir)
        file = open_file(run_dir / FILE_NAME, os.O_APPEND)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise OptionError(
            explain(
                "The folder for logs must not belong to a running job.",
                received=str(run_dir),
                do="Name another folder (--log-dir), or wait until that job has ended.",
            )
        ) from None
    except OSError:
        pass  # a file system without locks
    return file


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the events of a run in order; skips invalid lines, such as one cut off by a crash."""
    events = []
    for line in (run_dir / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                events.append(event)
    return events
