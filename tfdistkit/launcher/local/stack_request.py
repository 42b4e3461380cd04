"""Asks a process of this machine for its stacks: by a signal, and if it does not answer, by py-spy.

Imports only the standard library and sent modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Collection
from pathlib import Path

from tfdistkit.launcher.local.blocked import blocked_calls, thread_states
from tfdistkit.launcher.local.py_spy import PySpy, find_py_spy
from tfdistkit.launcher.local.watchdog import process_state
from tfdistkit.report.hangs.layout import BLOCKED, NO_STACKS, SPIED_STACKS, STACKS_FILE, STACKS_SIGNAL

# A process answers within milliseconds, unless the machine is very busy.
_ANSWER_S = 2.0
# A main thread in the kernel does not handle the signal. After this time another thread is asked, and py-spy.
_PATIENCE_S = 0.5
# Time for py-spy after that.
_SPY_S = 3.0


class StackRequest:
    """A request for the stacks of one process, which are appended to the file of stacks in its folder.

    Args:
        folder: The folder of the process.
        pid: The process; None if it is gone.
    """

    def __init__(self, folder: Path, pid: int | None):
        self._path, self._pid = folder / STACKS_FILE, pid
        self._begin = self._size = _size(self._path)
        self._asked_at = time.monotonic()
        self._spy: PySpy | None = None
        self._is_asked = pid is not None and self._is_open(pid) and request_stacks(pid)
        self._is_asked_again = False
        self.has_ended = pid is None

    def poll(self) -> bool:
        """Returns whether the answer has arrived, or will never arrive."""
        if self.has_ended:
            return True
        before, self._size = self._size, _size(self._path)
        if self._size > self._begin:
            self._end(is_complete=self._size == before)
            return self.has_ended
        elapsed_s = time.monotonic() - self._asked_at
        if not self._is_asked or elapsed_s > _PATIENCE_S:
            self._insist(elapsed_s)
        return self.has_ended

    def close(self) -> None:
        """Ends the request, with or without an answer."""
        self._end()

    def text(self) -> str:
        """Returns the answer: stacks as faulthandler writes them, and lines that begin as the constants of `layout`."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")
        return ""

    def _is_open(self, pid: int) -> bool:
        """Returns whether the process holds the file open for faulthandler; if not, a handler is the script's own."""
        path, folder = os.path.realpath(self._path), f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):  # It was closed meanwhile.
                    if os.readlink(f"{folder}/{name}") == path:
                        return True
        return False

    def _insist(self, elapsed_s: float) -> None:
        assert self._pid is not None
        if self._is_asked and not self._is_asked_again:
            self._is_asked_again = True
            request_stacks(self._pid, from_another_thread=True)
        if self._spy is None:
            program = find_py_spy()
            if program is not None:
                self._spy = PySpy(program, self._pid)
            elif not self._is_asked or elapsed_s > _ANSWER_S:
                self._give_up("is not installed")
        elif self._spy.poll():
            if self._spy.stacks:
                self._append(f"{SPIED_STACKS}\n{self._spy.stacks}")
                self._end()
            elif not self._is_asked or elapsed_s > _ANSWER_S:
                self._give_up(self._spy.problem)
        elif elapsed_s > _SPY_S:
            self._give_up("did not end in time")

    def _give_up(self, problem: str) -> None:
        assert self._pid is not None
        state = process_state(self._pid)
        why = {"T": "it is suspended (SIGSTOP)", "D": "it is blocked in the kernel"}.get(state, "it did not answer")
        self._append(f"{NO_STACKS}{why}, and py-spy {problem}\n")
        self._end()

    def _append(self, text: str) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError), open(os.open(self._path, flags, 0o600), "ab") as file:
            file.write(text.encode(errors="replace"))

    def _end(self, is_complete: bool = True) -> None:
        if self._spy is not None:
            self._spy.close()
        if is_complete and not self.has_ended and self._pid is not None:
            self._append("".join(f"{BLOCKED}{call}\n" for call in blocked_calls(self._pid)))
        self.has_ended = is_complete


def request_stacks(pid: int, from_another_thread: bool = False) -> bool:
    """Asks a process to write its stacks.

    Args:
        pid: The process.
        from_another_thread: Whether a thread other than the main thread should write them: any thread can write
            those of all, and the main thread may be blocked in the kernel.

    Returns:
        Whether it will: it has a handler for the signal, which would end it otherwise, and is not suspended.
    """
    if STACKS_SIGNAL is None or not _answers(pid, STACKS_SIGNAL):
        return False
    thread = _thread_that_runs(pid) if from_another_thread or process_state(pid) == "D" else None
    with contextlib.suppress(OSError, AttributeError):
        if thread is not None:
            return bool(ctypes.CDLL(None).tgkill(pid, thread, STACKS_SIGNAL) == 0)
        if not from_another_thread:
            os.kill(pid, STACKS_SIGNAL)
            return True
    return False


def is_runnable(pid: int, polling: Collection[int] = ()) -> bool:
    """Returns whether a thread of a process computes, or waits for a core.

    Args:
        pid: The process.
        polling: Its threads that do not count.
    """
    return any(state == "R" and thread not in polling for thread, state in thread_states(pid).items())


def _thread_that_runs(pid: int) -> int | None:
    """Returns a thread that is neither the main thread nor blocked in the kernel."""
    return next((thread for thread, state in thread_states(pid).items() if thread != pid and state in "RS"), None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _answers(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                is_caught = int(line.partition(":")[2], 16) >> (number - 1) & 1
                return bool(is_caught) and process_state(pid) not in ("T", "t")
    return False
