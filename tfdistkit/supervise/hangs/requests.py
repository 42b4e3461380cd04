"""Asks processes for the stacks of their threads (see `report.hangs.stacks`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit import env
from tfdistkit.launcher.local.stack_request import StackRequest, is_runnable
from tfdistkit.launcher.local.watchdog import process_state
from tfdistkit.report.hangs import mirror as mirrors
from tfdistkit.report.hangs.layout import BLOCKED, NO_STACKS, SPIED_STACKS, STACKS_FILE, Notes, read_notes
from tfdistkit.report.hangs.mirror import Mirror, read_mirror
from tfdistkit.report.hangs.stacks import Thread, parse_stacks

# The longest request of a process of this machine.
_LONGEST_S = 4.0
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
        text: The stacks as text, or why there are none.
        is_runnable: Whether one of its threads computes, or waits for a core.
    """

    notes: Notes | None
    state: str
    threads: tuple[Thread, ...] = ()
    text: str = ""
    is_runnable: bool = False

    @property
    def is_spied(self) -> bool:
        """Whether py-spy read the stacks."""
        return SPIED_STACKS in self.text.splitlines()

    @property
    def no_stack(self) -> str:
        """Why there are no stacks; empty if there are some, or if the process has ended."""
        return next(self._lines(NO_STACKS), "") if not self.threads else ""

    @property
    def blocked(self) -> tuple[str, ...]:
        """What its threads are blocked by in the kernel (see `launcher.local.blocked`)."""
        return tuple(self._lines(BLOCKED))

    def _lines(self, begin: str) -> Iterator[str]:
        return (line.removeprefix(begin) for line in self.text.splitlines() if line.startswith(begin))


def ask_for_stacks(folders: Sequence[Path]) -> list[Answer]:
    """Asks processes for their stacks, all at once; waits a few seconds for the slowest.

    Args:
        folders: The folders of the processes.

    Returns:
        An answer for each.
    """
    asked = [_Here(folder) if read_mirror(folder) is None else _Elsewhere(folder) for folder in folders]
    timeout_s = max((one.timeout_s for one in asked), default=0.0)
    deadline = time.monotonic() + timeout_s
    while not all([one.poll() for one in asked]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
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


class _Here:
    """A process on this machine that was asked for its stacks.

    Args:
        folder: Its folder.
    """

    timeout_s = _LONGEST_S

    def __init__(self, folder: Path):
        self._folder, self._notes = folder, read_notes(folder)
        self._request = StackRequest(folder, self._pid())

    def poll(self) -> bool:
        """Returns whether the answer has arrived, or will never arrive."""
        return self._request.poll()

    def answer(self) -> Answer:
        """Returns the answer."""
        self._request.close()
        pid, text = self._pid(), self._request.text()
        runs = pid is not None and self._notes is not None and is_runnable(pid, self._notes.polling)
        state = process_state(pid) if pid is not None else ""
        return Answer(self._notes, state, tuple(parse_stacks(text)), text, runs)

    def _pid(self) -> int | None:
        pid = self._notes.pid if self._notes is not None else None
        return pid if pid is not None and is_process_of(pid, self._folder) else None


class _Elsewhere:
    """A process on another host that was asked for its stacks, by its agent.

    Args:
        folder: Its folder on this machine.
    """

    timeout_s = _ANSWER_ELSEWHERE_S

    def __init__(self, folder: Path):
        self._folder, self._notes = folder, read_notes(folder)
        self._begin = self._size = self._size_now()
        self._answers = self._answers_now()
        mirrors.request_stacks(folder)

    def poll(self) -> bool:
        """Returns whether the answer has arrived."""
        before, self._size = self._size, self._size_now()
        return self._answers_now() > self._answers and before == self._size

    def answer(self) -> Answer:
        """Returns the answer."""
        text = ""
        if self._answers_now() > self._answers:
            with contextlib.suppress(OSError), (self._folder / STACKS_FILE).open("rb") as file:
                file.seek(self._begin)
                text = file.read().decode(errors="replace")
        mirror = read_mirror(self._folder) or Mirror()
        return Answer(self._notes, mirror.state, tuple(parse_stacks(text)), text, mirror.is_runnable)

    def _answers_now(self) -> int:
        return (read_mirror(self._folder) or Mirror()).answers

    def _size_now(self) -> int:
        with contextlib.suppress(OSError):
            return (self._folder / STACKS_FILE).stat().st_size
        return 0
