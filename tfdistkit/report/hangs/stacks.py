"""Writes the stacks of all threads of this process on request by another process, and parses them.

The request is a real-time signal, which scripts hardly use. faulthandler writes the stacks, even if the process hangs
in C code. A process that is suspended (SIGSTOP) or blocked in the kernel does not answer.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from tfdistkit import env
from tfdistkit.report.hangs.layout import STACKS_FILE, STACKS_SIGNAL
from tfdistkit.report.private_files import open_file

FILE_NAME, SIGNAL = STACKS_FILE, STACKS_SIGNAL

_APPEND = os.O_APPEND | os.O_TRUNC
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*:$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


@dataclass(frozen=True)
class Frame:
    """A function call.

    Args:
        file: Its source file.
        line: The line; 0 if unknown.
        function: The name of the function.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Returns `train.py:12 on_epoch_end`."""
        return f"{Path(self.file).name}:{self.line} {self.function}"


@dataclass(frozen=True)
class Thread:
    """The stack of a thread.

    Args:
        ident: Its identifier, as in `threading`.
        frames: Its calls, the innermost first.
    """

    ident: int
    frames: tuple[Frame, ...]


def answer_requests() -> None:
    """Makes this process write its stacks into its folder, if it has one, when the signal arrives."""
    folder = env.text(env.TASK_DIR)
    if folder is None or SIGNAL is None or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return
    with contextlib.suppress(OSError):
        # Never closed: faulthandler needs the descriptor until the process ends.
        faulthandler.register(SIGNAL, file=open_file(Path(folder, FILE_NAME), _APPEND), all_threads=True)


def parse_stacks(text: str) -> list[Thread]:
    """Parses the output of faulthandler; the main thread is the last one.

    Args:
        text: The output.
    """
    threads: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((int(head[1], 16), []))
        elif threads and (found := _FRAME.match(line)):
            number = int(found[2]) if found[2].isdecimal() else 0
            threads[-1][1].append(Frame(found[1], number, found[3]))
    return [Thread(ident, tuple(frames)) for ident, frames in threads]
