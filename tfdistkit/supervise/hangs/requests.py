"""Asks processes for the stacks of their threads (see `report.hangs.stacks`)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit import env
from tfdistkit.launcher.local.watchdog import process_state
from tfdistkit.report.hangs.layout import Notes, read_notes
from tfdistkit.report.hangs.stacks import FILE_NAME, SIGNAL, Thread, parse_stacks

# A process answers within milliseconds, unless the machine is very busy.
_ANSWER_S = 2.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Answer:
    """What a process is doing.

    Args:
        notes: Its progress notes; None without them.
        state: The kernel's letter of it (`T` if it is suspended); empty if it is gone.
        threads: The stacks of its threads, the main thread last; empty if it did not answer.
        text: The stacks as text.
        is_runnable: Whether one of its threads computes, or waits for a core.
    """

    notes: Notes | None
    state: str
    threads: tuple[Thread, ...] = ()
    text: str = ""
    is_runnable: bool = False


def ask_for_stacks(folders: Sequence[Path], timeout_s: float = _ANSWER_S) -> list[Answer]:
    """Asks processes for their stacks, all at once.

    Args:
        folders: The folders of the processes.
        timeout_s: How long to wait for the slowest, in seconds.

    Returns:
        An answer for each.
    """
    asked = [_ask(folder) for folder in folders]
    deadline = time.monotonic() + timeout_s
    before: list[int] = []
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        sizes = [0 if begin is None else _size(folder) - begin for folder, (_, begin) in zip(folders, asked)]
        answered = all(size > 0 or begin is None for size, (_, begin) in zip(sizes, asked))
        if answered and sizes == before:  # Complete: no file has grown since the last look.
            break
        before = sizes
    return [_answer(folder, notes, begin) for folder, (notes, begin) in zip(folders, asked)]


def is_process_of(pid: int, folder: Path) -> bool:
    """Returns whether a process belongs to a folder: its number may have been used again.

    Args:
        pid: The process.
        folder: The folder.
    """
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{env.TASK_DIR}={folder}".encode() in variables


def _ask(folder: Path) -> tuple[Notes | None, int | None]:
    """Sends the signal; returns the notes, and where in the file the answer will begin, None if none will come."""
    notes = read_notes(folder)
    if notes is None or SIGNAL is None or not is_process_of(notes.pid, folder) or not _answers(notes.pid):
        return notes, None
    begin = _size(folder)
    with contextlib.suppress(OSError):
        os.kill(notes.pid, SIGNAL)
        return notes, begin
    return notes, None


def _answers(pid: int) -> bool:
    """Returns whether a process has a handler for the signal, which would end it otherwise, and runs."""
    assert SIGNAL is not None
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.partition(":")[2], 16) >> (SIGNAL - 1) & 1) and process_state(pid) not in (
                    "T",
                    "t",
                )
    return False


def _answer(folder: Path, notes: Notes | None, begin: int | None) -> Answer:
    state = process_state(notes.pid) if notes is not None and is_process_of(notes.pid, folder) else ""
    text = ""
    if begin is not None:
        with contextlib.suppress(OSError), (folder / FILE_NAME).open("rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace")
    is_runnable = bool(state) and notes is not None and "R" in _thread_states(notes.pid)
    return Answer(notes, state, tuple(parse_stacks(text)), text, is_runnable)


def _thread_states(pid: int) -> set[str]:
    states = set()
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.add(path.read_bytes().rpartition(b")")[2].split()[0].decode())
    return states


def _size(folder: Path) -> int:
    try:
        return (folder / FILE_NAME).stat().st_size
    except OSError:
        return 0
