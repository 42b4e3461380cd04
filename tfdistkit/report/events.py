"""The event log of a run: `events.jsonl` in the run folder, one JSON object per line, appended as things happen."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FILE_NAME = "events.jsonl"


class EventLog:
    """Appends events. Each is on disk, whole, when `add` returns, so the file tells the truth after a crash."""

    def __init__(self, run_dir: Path):
        self._file = os.open(run_dir / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)

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


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the events of a run in order; lines that are none, such as one cut off by a crash, are left out."""
    events = []
    for line in (run_dir / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event:
                events.append(event)
    return events
