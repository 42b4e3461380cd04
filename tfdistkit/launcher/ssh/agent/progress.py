"""An agent's look at the progress of a worker on its host: notes, work and stacks, for the launcher.

Runs on the host without site-packages: imports only the standard library and sent modules.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tfdistkit.launcher.local.activity import Activity
from tfdistkit.launcher.local.phase_samples import PhaseSamples
from tfdistkit.launcher.local.stack_request import StackRequest, is_runnable
from tfdistkit.launcher.local.watchdog import process_state
from tfdistkit.launcher.ssh.agent.protocol import encode
from tfdistkit.report.hangs.layout import FILE_NAME, parse_notes

_EVERY_S = 1.0


class Progress:
    """The progress of one worker.

    Args:
        worker: The launcher's number for it.
        folder: Its folder on this host.
    """

    def __init__(self, worker: int, folder: str):
        self._worker, self._folder = worker, Path(folder)
        self._activity, self._samples = Activity(0), PhaseSamples(self._folder)
        self._sent: tuple[bytes, str] = (b"", "")
        self._looked_at = 0.0
        self._request: StackRequest | None = None

    def ask(self) -> None:
        """Asks the worker for its stacks; a later `poll` yields the answer."""
        notes = parse_notes(self._read(FILE_NAME))
        if self._request is not None:
            self._request.close()
        self._request = StackRequest(self._folder, notes.pid if notes is not None else None)

    def poll(self) -> Iterator[bytes]:
        """Yields messages about what is new since the last call."""
        now = time.monotonic()
        if self._request is not None and self._request.poll():
            pid, text = self._activity.pid, self._request.text().encode()
            self._request = None
            runnable = is_runnable(pid, self._activity.polling)
            yield self._message("stacks", text, state=process_state(pid), runnable=runnable)
        self._samples.look(now)
        elapsed_s = now - self._looked_at
        if elapsed_s < _EVERY_S:
            return
        self._looked_at = now
        data = self._read(FILE_NAME)
        notes = parse_notes(data)
        if notes is None:
            return
        if self._activity.pid != notes.pid:
            self._activity = Activity(notes.pid)
        self._activity.polling = notes.polling
        is_busy, state = self._activity.is_busy(elapsed_s), process_state(notes.pid)
        if is_busy or self._sent != (data, state):
            self._sent = (data, state)
            samples = dict(self._samples.counts)
            yield self._message("progress", data, state=state, busy=is_busy, now_s=now, samples=samples)

    def _message(self, what: str, payload: bytes, **fields: object) -> bytes:
        return encode({"is": what, "worker": self._worker, **fields}, payload)

    def _read(self, name: str) -> bytes:
        with contextlib.suppress(OSError), open(os.path.join(self._folder, name), "rb") as file:
            return file.read()
        return b""
