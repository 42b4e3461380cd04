"""Keeps the status of a process on another host as files in the process's folder on this machine.

The agent of the host sends the status, and the launcher writes it here, beside the progress notes themselves. So the
launcher, `tfdistkit ps` and `tfdistkit stacks` read files of this machine, wherever a process runs. A reader that wants
the stacks creates a request file. The launcher appends the stacks to the file of stacks, to which a process on this
machine writes its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.report.hangs.layout import FILE_NAME as NOTES_FILE
from tfdistkit.report.hangs.layout import STACKS_FILE, by_own_clock
from tfdistkit.report.private_files import open_file, write_file

FILE_NAME = "mirror"
_REQUEST = "stacks_wanted"


@dataclass(frozen=True)
class Mirror:
    """The status of a process on another host, as its agent last sent it.

    Args:
        state: The kernel's letter for its state (`T` if it is suspended).
        is_runnable: Whether one of its threads computed, or waited for a core, when its stacks were asked for.
        work: A number that grows while the process uses CPU time, or reads or writes data.
        answers: The number of requests for its stacks that ended, with or without stacks.
        samples: The number of samples of each phase of its training.
    """

    state: str = ""
    is_runnable: bool = False
    work: int = 0
    answers: int = 0
    samples: dict[str, int] = dataclasses.field(default_factory=dict)


def read_mirror(folder: Path) -> Mirror | None:
    """Returns the status of a process on another host; None for one on this machine, or before its first note.

    Args:
        folder: The folder of the process.
    """
    try:
        return Mirror(**json.loads((folder / FILE_NAME).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def request_stacks(folder: Path) -> None:
    """Asks the launcher for the stacks of a process on another host.

    Args:
        folder: The folder of the process.
    """
    with contextlib.suppress(OSError):
        (folder / _REQUEST).touch()


class MirrorWriter:
    """Writes what the agent of a host sends of one process.

    Args:
        folder: The folder of the process.
    """

    def __init__(self, folder: Path):
        self._folder, self._mirror, self._is_asked = folder, Mirror(), False

    def note(self, notes: bytes, now_s: float, state: str, is_busy: bool, samples: dict[str, int]) -> None:
        """Writes progress notes.

        Args:
            notes: Their file on the host.
            now_s: `time.monotonic` of the host.
            state: As in `Mirror`.
            is_busy: Whether the process has worked since the last call.
            samples: As in `Mirror`.
        """
        # First, because notes without a mirror are those of a process on this machine.
        self._write(state=state, work=self._mirror.work + is_busy, samples=samples)
        _replace(self._folder / NOTES_FILE, by_own_clock(notes, time.monotonic() - now_s))

    def take_request(self) -> bool:
        """Returns whether someone has asked for the stacks since the last answer; once for each request."""
        if self._is_asked or not (self._folder / _REQUEST).exists():
            return False
        self._is_asked = True
        return True

    def answer(self, stacks: bytes, state: str, is_runnable: bool) -> None:
        """Answers the requests so far.

        Args:
            stacks: The stacks; empty if the process did not answer.
            state: As in `Mirror`.
            is_runnable: As in `Mirror`.
        """
        self._is_asked = False
        with contextlib.suppress(OSError):
            with open(open_file(self._folder / STACKS_FILE, os.O_APPEND), "ab") as file:
                file.write(stacks)
        with contextlib.suppress(OSError):
            (self._folder / _REQUEST).unlink(missing_ok=True)
        self._write(state=state, is_runnable=is_runnable, answers=self._mirror.answers + 1)

    def _write(self, **changed: object) -> None:
        self._mirror = dataclasses.replace(self._mirror, **changed)  # type: ignore[arg-type]
        _replace(self._folder / FILE_NAME, json.dumps(dataclasses.asdict(self._mirror)).encode())


def _replace(path: Path, data: bytes) -> None:
    """Replaces a file atomically, so that no reader sees a part of it. On a full disk the job continues without it."""
    with contextlib.suppress(OSError):
        new = path.with_name(f".{path.name}")
        write_file(new, data)
        new.replace(path)
