"""Copy the workers' output unchanged to one log file per worker and stream, and to the console."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from pathlib import Path
from typing import IO

from tfdistkit.launcher.backend import WorkerHandle
from tfdistkit.launcher.output.console import Console
from tfdistkit.report.private_files import open_file

_READ_BYTES = 65_536
_POLL_S = 0.2


class LogPump(threading.Thread):
    """Copies the output of workers to their log files and to the console.

    A separate thread: while the console is blocked (a terminal after Ctrl-S, `| less`), printing workers block, as they
    would without a launcher, and the supervisor still handles ended workers, signals and deadlines.
    """

    def __init__(self, console: Console):
        super().__init__(name="tfdistkit-logs", daemon=True)
        self._console = console
        self._selector = selectors.DefaultSelector()
        self._should_stop = threading.Event()
        self._is_let_go = threading.Event()
        self._is_ending = threading.Event()  # The workers have ended: the remaining output is shown completely.
        self._streams: list[_Stream] = []
        self.unshown_bytes = 0

    @property
    def incomplete(self) -> list[str]:
        """The incomplete logs, with the reason."""
        return [stream.problem for stream in self._streams if stream.problem]

    def add(self, worker_index: int, worker: WorkerHandle) -> None:
        """Adds a worker's output; must be called before `start`.

        Args:
            worker_index: The worker's index in the console.
            worker: The worker.
        """
        spec = worker.spec
        for pipe, channel, path in (
            (worker.stdout, "stdout", spec.stdout_path),
            (worker.stderr, "stderr", spec.stderr_path),
        ):
            os.set_blocking(pipe.fileno(), False)
            self._streams.append(_Stream(worker_index, channel, pipe, path, self._console))
            self._selector.register(pipe, selectors.EVENT_READ, self._streams[-1])

    def run(self) -> None:
        while self._selector.get_map():
            if not self._is_ending.is_set() and not self._is_let_go.is_set() and not self._console.has_room(_POLL_S):
                continue
            # When stopping: read the available output, and exit when there is no more.
            ready = self._selector.select(0 if self._should_stop.is_set() else _POLL_S)
            for key, _ in ready:
                self._carry(key)
            if not ready and self._should_stop.is_set():
                break
            self._console.refresh()
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()

    def _carry(self, key: selectors.SelectorKey) -> None:
        stream: _Stream = key.data
        is_shown = self._is_ending.is_set() or not self._is_let_go.is_set() or self._console.has_room(0)
        goes_on, count = stream.carry(is_shown)
        if not is_shown:
            self.unshown_bytes += count
        if not goes_on:
            self._selector.unregister(key.fileobj)
            stream.close()

    def let_go(self) -> None:
        """Stops waiting for the console, as the job is being stopped; output that it rejects is only in the logs."""
        self._is_let_go.set()

    def finish(self, deadline_s: float) -> None:
        """Waits for the end of all output, after the workers have ended.

        Args:
            deadline_s: The timeout, in seconds; an escaped child process may hold a pipe open.
        """
        self._is_ending.set()
        self.join(deadline_s)
        self._should_stop.set()
        self.join(_POLL_S + 1)


class _Stream:
    """One output stream of one worker."""

    def __init__(self, worker_index: int, channel: str, pipe: IO[bytes], path: Path, console: Console):
        self._worker_index, self._channel, self._pipe, self._console = worker_index, channel, pipe, console
        self._file: int | None = None
        self._path = path
        self.problem = ""
        try:
            self._file = open_file(path)
        except OSError as error:  # such as a full disk
            self._give_up(f"{path} could not be created: {error}")

    def carry(self, is_shown: bool) -> tuple[bool, int]:
        """Copies the available bytes.

        Args:
            is_shown: Whether to copy them to the console, too.

        Returns:
            Whether the stream is still open, and the number of bytes.
        """
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True, 0
        except OSError as error:
            self._console.note(f"tfdistkit: the rest of {self._path.name} could not be read: {error}")
            return False, 0
        self._keep(data)
        if is_shown:
            self._show(data)
        return bool(data), len(data)

    def _show(self, data: bytes) -> None:
        try:
            self._console.show(self._worker_index, self._channel, data)
        except Exception as error:  # an error with one stream must not stop the others
            self._console.note(f"tfdistkit: a line of {self._path} could not be shown: {error!r}")

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._console.end(self._worker_index, self._channel)
        self._pipe.close()
        if self._file is not None:
            os.close(self._file)

    def _keep(self, data: bytes) -> None:
        left = memoryview(data)
        while left and self._file is not None:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:  # such as a full disk, which must not block the workers
                os.close(self._file)
                self._file = None
                self._give_up(f"{self._path} is not complete: {error}")

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self._console.note(f"tfdistkit: {problem}")
