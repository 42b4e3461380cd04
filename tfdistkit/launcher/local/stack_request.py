"""Asks a process of this machine for its stacks, by a signal. Imports only the standard library and sent modules."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tfdistkit.launcher.local.watchdog import process_state
from tfdistkit.report.hangs.layout import STACKS_SIGNAL


def request_stacks(pid: int) -> bool:
    """Asks a process to write its stacks.

    Args:
        pid: The process.

    Returns:
        Whether it will: it has a handler for the signal, which would end it otherwise, and is not suspended.
    """
    if STACKS_SIGNAL is None or not _answers(pid, STACKS_SIGNAL):
        return False
    with contextlib.suppress(OSError):
        os.kill(pid, STACKS_SIGNAL)
        return True
    return False


def is_runnable(pid: int) -> bool:
    """Returns whether a thread of a process computes, or waits for a core.

    Args:
        pid: The process.
    """
    with contextlib.suppress(OSError):  # It has just ended; so may one of its threads.
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError):
                if Path(f"/proc/{pid}/task/{name}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"R":
                    return True
    return False


def _answers(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                is_caught = int(line.partition(":")[2], 16) >> (number - 1) & 1
                return bool(is_caught) and process_state(pid) not in ("T", "t")
    return False
