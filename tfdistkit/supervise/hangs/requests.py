"""Asks processes for the stacks of their threads (see `report.hangs.stacks`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit import env
from tfdistkit.launcher.local.stack_request import is_runnable, request_stacks
from tfdistkit.launcher.local.watchdog import process_state
from tfdistkit.report.hangs import mirror as mirrors
from tfdistkit.report.hangs.layout import Notes, read_notes
from tfdistkit.report.hangs.mirror import Mirror, read_mirror
from tfdistkit.report.hangs.stacks import FILE_NAME, Thread, parse_stacks

# A process answers within milliseconds, unless the machine is very busy.
_ANSWER_S = 2.0
# The agent of a host waits as long, and its answer has to be sent.
_ANSWER_ELSEWHERE_S = 6.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Answer:
    """The progress notes and stacks of a process.

    Args:
        notes: Its progress notes; None without them.
        state: The kernel's letter for its state (`T` if it is suspended); empty if it has ended.
        threads: The stacks of its threads, the main thread last; empty if it did not answer.
        text: The stacks as text.
        is_runnable: Whether one of its threads computes, or waits for a core.
    """

    notes: Notes | None
    state: str
    threads: tuple[Thread, ...] = ()
    text: str = ""
    is_runnable: bool = False


def ask_for_stacks(folders: Sequence[Path], timeout_s: float | None = None) -> list[Answer]:
    """Asks processes for their stacks, all at once.

    Args:
        folders: The folders of the processes.
        timeout_s: How long to wait for the slowest, in seconds. Default: 2, with processes on other hosts 6.

    Returns:
        An answer for each.
    """
    asked = [_ask(folder) for folder in folders]
    if timeout_s is None:
        timeout_s = _ANSWER_S if all(one.mirror is None for one in asked) else _ANSWER_ELSEWHERE_S
    deadline = time.monotonic() + timeout_s
    before: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        sizes = [_size(folder) for folder in folders]
        if all(one.has_answered for one in asked) and sizes == before:  # Complete: the file has not grown since.
            break
        before = sizes
    return [one.answer() for one in asked]


def is_process_of(pid: int, folder: Path) -> bool:
    """Returns whether a process belongs to a folder: its process id may have been reused.

    Args:
        pid: The process.
        folder: The folder.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{env.TASK_DIR}={folder}".encode() in variables


def _ask(folder: Path) -> _Asked:
    notes, mirror, begin = read_notes(folder), read_mirror(folder), _size(folder)
    if mirror is not None:
        mirrors.request_stacks(folder)
        return _Asked(folder, notes, begin, mirror)
    will_answer = notes is not None and is_process_of(notes.pid, folder) and request_stacks(notes.pid)
    return _Asked(folder, notes, begin if will_answer else None)


@dataclass(frozen=True)
class _Asked:
    """A process that was asked for its stacks.

    Args:
        folder: Its folder.
        notes: Its notes.
        begin: Where in the file of stacks the answer begins; None if none will come.
        mirror: Its mirror before the request if it is on another host; None on this machine.
    """

    folder: Path
    notes: Notes | None
    begin: int | None
    mirror: Mirror | None = None

    @property
    def has_answered(self) -> bool:
        """Whether the answer has arrived, at least in part, or will never arrive."""
        if self.begin is None:
            return True
        if self.mirror is None:
            return _size(self.folder) > self.begin
        now = read_mirror(self.folder)
        return now is not None and now.answers > self.mirror.answers

    def answer(self) -> Answer:
        """Returns the answer."""
        notes, text = self.notes, ""
        if self.begin is not None and self.has_answered:
            with contextlib.suppress(OSError), (self.folder / FILE_NAME).open("rb") as file:
                file.seek(self.begin)
                text = file.read().decode(errors="replace")
        mirror = read_mirror(self.folder) if self.mirror is not None else None
        if mirror is not None:
            state, runs = mirror.state, mirror.is_runnable
        else:
            state = process_state(notes.pid) if notes is not None and is_process_of(notes.pid, self.folder) else ""
            runs = bool(state) and notes is not None and is_runnable(notes.pid)
        return Answer(notes, state, tuple(parse_stacks(text)), text, runs)


def _size(folder: Path) -> int:
    try:
        return (folder / FILE_NAME).stat().st_size
    except OSError:
        return 0
