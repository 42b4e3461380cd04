"""Reads the stacks of a process of this machine from outside, with py-spy where it is installed.

py-spy reads the memory of a process, so the process need not run: it may be suspended, wait in the kernel for a disk,
or have its signals blocked. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# py-spy takes 0.03 s on an idle machine.
_TIMEOUT_S = 2.0
# It reads the executable of the process each time, so not more of them run at once.
_AT_ONCE = 8
_room = threading.BoundedSemaphore(_AT_ONCE)


def find_py_spy() -> str | None:
    """Returns the path of the program, beside this Python or on PATH; None if it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if sys.executable and beside.is_file() else shutil.which("py-spy")


class PySpy:
    """A run of py-spy.

    Args:
        program: Its path.
        pid: The process.
    """

    def __init__(self, program: str, pid: int):
        # `--nonblocking`, because without it py-spy stops the process, and waits for one that is blocked in the kernel.
        self._words = [program, "dump", "--nonblocking", "--full-filenames", "--json", "--pid", str(pid)]
        self._output = tempfile.TemporaryFile()  # Not a pipe, which a long answer would fill.
        self._child: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self.stacks = ""
        self.problem = ""

    def poll(self) -> bool:
        """Returns whether it has ended, with `stacks` as faulthandler writes them, or a `problem`."""
        if self.stacks or self.problem:
            return True
        if self._child is None:
            self._start()
        elif (code := self._child.poll()) is not None:
            self._read(code)
        elif time.monotonic() > self._deadline:
            self.close()
            self.problem = f"did not end within {_TIMEOUT_S:g} s"
        return bool(self.stacks or self.problem)

    def close(self) -> None:
        """Ends the run."""
        child, self._child = self._child, None
        if child is not None:
            _room.release()
            child.kill()
            # It may be blocked in the kernel itself; `subprocess` reaps it later then.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.2)
        self._output.close()

    def _start(self) -> None:
        if not _room.acquire(blocking=False):
            return
        self._deadline = time.monotonic() + _TIMEOUT_S
        try:
            self._child = subprocess.Popen(
                self._words, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            _room.release()
            self.problem = f"could not be started: {error.strerror}"

    def _read(self, code: int) -> None:
        self._output.seek(0)
        output = self._output.read()
        self.close()
        if code == 0:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                self.stacks = _as_faulthandler(output)
        if not self.stacks:
            # With a reason after "Caused by:", the first line says only what py-spy was doing.
            lines = [line.strip() for line in output.decode(errors="replace").splitlines()]
            cause = lines[lines.index("Caused by:") + 1 :] if "Caused by:" in lines else lines
            self.problem = f"failed: {cause[0].removeprefix('0: ')[:200]}" if cause else f"failed with exit code {code}"


def _as_faulthandler(output: bytes) -> str:
    lines = []
    for thread in json.loads(output):
        lines.append(f"Thread 0x{thread['thread_id']:016x} (most recent call first):")
        for frame in thread["frames"]:
            # faulthandler writes `run` where py-spy writes `Thread.run`.
            function = frame["name"].rpartition(".")[2]
            lines.append(f'  File "{frame["filename"]}", line {frame["line"]} in {function}')
    return "".join(f"{line}\n" for line in lines)
