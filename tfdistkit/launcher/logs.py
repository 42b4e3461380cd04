"""The workers' output: kept whole, byte for byte, in one file per worker and stream, and shown as it comes."""

from __future__ import annotations

import os
import selectors
import threading
from pathlib import Path
from typing import IO

from tfdistkit.launcher.backend import WorkerHandle
from tfdistkit.launcher.console import Console

_READ_BYTES = 65_536
_LOOK_S = 0.2


class LogPump(threading.Thread):
    """Carries the output of some workers to their log files and to the console.

    A thread of its own: where the console blocks (a terminal after Ctrl-S, `| less`), the supervisor still sees
    workers end, signals and deadlines.
    """

    def __init__(self, console: Console):
        super().__init__(name="tfdistkit-logs", daemon=True)
        self._console = console
        self._selector = selectors.DefaultSelector()
        self._hurry = threading.Event()

    def add(self, place: int, worker: WorkerHandle) -> None:
        """Takes over a worker's output; to be called before `start`.

        Args:
            place: By which the console knows the worker.
            worker: The worker.
        """
        spec = worker.spec
        for pipe, channel, path in (
            (worker.stdout, "stdout", spec.stdout_path),
            (worker.stderr, "stderr", spec.stderr_path),
        ):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, _Stream(place, channel, pipe, path, self._console))

    def run(self) -> None:
        while self._selector.get_map():
            # In a hurry: take what is there, and leave when there is nothing more.
            ready = self._selector.select(0 if self._hurry.is_set() else _LOOK_S)
            for key, _ in ready:
                if not key.data.carry():
                    self._selector.unregister(key.fileobj)
                    key.data.close()
            if not ready and self._hurry.is_set():
                break
            self._console.refresh()
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def finish(self, deadline_s: float) -> None:
        """Waits for the end of all output.

        Args:
            deadline_s: For how long; a process that escaped may hold a pipe open, and a console can block.
        """
        self.join(deadline_s)
        self._hurry.set()
        self.join(_LOOK_S + 1)


class _Stream:
    """One stream of one worker."""

    def __init__(self, place: int, channel: str, pipe: IO[bytes], path: Path, console: Console):
        self._place, self._channel, self._pipe, self._console = place, channel, pipe, console
        self._file: int | None = None
        self._path = path
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        except OSError as error:  # such as a full disk
            console.note(f"tfdistkit: {path} is not kept: {error}")

    def carry(self) -> bool:
        """Carries what is there now; returns False at the end of the stream."""
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        self._keep(data)
        self._console.show(self._place, self._channel, data)
        return bool(data)

    def close(self) -> None:
        self._console.end(self._place, self._channel)
        self._pipe.close()
        if self._file is not None:
            os.close(self._file)

    def _keep(self, data: bytes) -> None:
        left = memoryview(data)
        while left and self._file is not None:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:  # such as a full disk: the workers must not block because of it
                os.close(self._file)
                self._file = None
                self._console.note(f"tfdistkit: {self._path} is not complete: {error}")
