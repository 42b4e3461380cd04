"""Runs a command at intervals without waiting for it; it may hang, or print without end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

# Enough for some thousand hosts.
_MOST_BYTES = 262_144
_SHOWN_BYTES = 400
# prctl(2): the signal sent to a process when its parent exits.
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Answer:
    """The result of one run of a command.

    Args:
        exit_code: Its exit code; None if it did not end in time, -N if signal N killed it.
        text: What it printed.
        complaint: Why it could not be started, or the end of its stderr.
    """

    exit_code: int | None
    text: str = ""
    complaint: str = ""


class PolledCommand:
    """Runs a command at intervals, one run at a time.

    Args:
        words: The command.
        every_s: Seconds from the end of one run to the start of the next.
        timeout_s: Seconds after which a run is killed.
        variables: Its environment; None for this process's.
    """

    def __init__(self, words: Sequence[str], every_s: float, timeout_s: float, variables: Mapping[str, str] | None):
        self._words, self._every_s, self._timeout_s = list(words), every_s, timeout_s
        self._variables = variables
        self._child: subprocess.Popen[bytes] | None = None
        self._due = time.monotonic()
        self._deadline = 0.0
        self._files: tuple[IO[bytes], IO[bytes]] | None = None
        self._in_child = _dying_with_parent()

    def poll(self) -> Answer | None:
        """Starts a run if one is due; returns the answer of a run that has ended, once. Never waits."""
        if self._child is None:
            return self._start() if time.monotonic() >= self._due else None
        code = self._child.poll()
        if code is None and time.monotonic() < self._deadline:
            return None
        # Also the processes that it started and left running.
        self._kill()
        return self._finish(code)

    def close(self) -> None:
        """Kills a run that has not ended."""
        if self._child is not None:
            self._kill()
            self._finish(None)

    def _start(self) -> Answer | None:
        # Not pipes: nothing would read them while the command prints.
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._due = time.monotonic() + self._every_s
        try:
            self._child = subprocess.Popen(
                self._words,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=self._files[0],
                stderr=self._files[1],
                start_new_session=True,
                preexec_fn=self._in_child,  # noqa: PLW1509  # one system call
            )
        except OSError as error:
            self._close_files()
            return Answer(126, complaint=str(error))
        self._deadline = time.monotonic() + self._timeout_s
        return None

    def _finish(self, code: int | None) -> Answer:
        assert self._files is not None
        texts = [_read(file) for file in self._files]
        self._close_files()
        self._child, self._due = None, time.monotonic() + self._every_s
        return Answer(code, texts[0], texts[1].strip()[-_SHOWN_BYTES:])

    def _kill(self) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=1)

    def _close_files(self) -> None:
        for file in self._files or ():
            file.close()
        self._files = None


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_BYTES).decode(errors="replace")


def _dying_with_parent() -> Callable[[], object] | None:
    """Returns a function by which a child ends with this process, also after a SIGKILL; None if not supported."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
