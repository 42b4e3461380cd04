"""Finds what the threads of a process of this machine wait for in the kernel, such as a file of a dead NFS server.

The threads of an input pipeline are TensorFlow's, which have no Python stack. The links in /proc name the file without
touching its file system, which may be dead. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

# What system calls do, by their number: those whose first argument is an open file, and those with the name of a file
# as the first or second one (open, stat, access, mkdir, unlink, rename and their variants).
_CALLS = {
    "x86_64": {0: "reading", 17: "reading", 19: "reading", 1: "writing", 18: "writing", 20: "writing",
               74: "writing", 75: "writing"},
    "aarch64": {63: "reading", 65: "reading", 67: "reading", 64: "writing", 66: "writing", 68: "writing",
                82: "writing", 83: "writing"},
}  # fmt: skip
_NAME_ARGUMENTS = {
    "x86_64": {2: 0, 4: 0, 6: 0, 21: 0, 82: 0, 83: 0, 87: 0, 257: 1, 258: 1, 262: 1, 263: 1, 332: 1, 439: 1},
    "aarch64": {34: 1, 35: 1, 38: 1, 48: 1, 56: 1, 79: 1, 291: 1, 439: 1},
}
_NAME_BYTES = 4096
# Terminals, devices and GPUs; a wait for them says nothing about a disk.
_NO_FILES = ("/dev/", "/proc/", "/sys/")
# Where no file is known, as in a call that opens one.
SOMETHING = "a disk or a network"


def blocked_calls(pid: int) -> list[str]:
    """Returns what the threads of a process are blocked by, such as `reading /data/a.tfrecord`, without duplicates.

    Args:
        pid: The process.
    """
    found = list(dict.fromkeys(blocked_threads(pid).values()))
    return [call for call in found if call != SOMETHING] or found


def blocked_threads(pid: int) -> dict[int, str]:
    """Returns the threads of a process that are blocked by a file, with what they do to it.

    Args:
        pid: The process.
    """
    found = {}
    for thread, state in thread_states(pid).items():
        call = _call_on_file(pid, thread) if state in "SD" else None
        if call is not None or state == "D":
            found[thread] = call or SOMETHING
    return found


def thread_states(pid: int) -> dict[int, str]:
    """Returns the kernel's letter for the state of each thread of a process.

    Args:
        pid: The process.
    """
    states = {}
    with contextlib.suppress(OSError):  # It has just ended; so may one of its threads.
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, IndexError):
                stat = Path(f"/proc/{pid}/task/{name}/stat").read_bytes()
                states[int(name)] = stat.rpartition(b")")[2].split()[0].decode()
    return states


def _call_on_file(pid: int, thread: int) -> str | None:
    """Returns the call on a file that a thread is in; None without one, or where the kernel hides it."""
    machine = platform.machine()
    with contextlib.suppress(OSError, ValueError):
        # Of a thread that runs, the file has one word only.
        number, *arguments = Path(f"/proc/{pid}/task/{thread}/syscall").read_text(encoding="ascii").split()
        verb, place = _CALLS.get(machine, {}).get(int(number)), _NAME_ARGUMENTS.get(machine, {}).get(int(number))
        path = ""
        if verb is not None and arguments:
            path = os.readlink(f"/proc/{pid}/fd/{int(arguments[0], 16)}")
        elif place is not None and arguments:
            verb, path = "opening", _text_at(pid, int(arguments[place], 16))
        if path.startswith("/") and not path.startswith(_NO_FILES):
            return f"{verb} {path}"
    return None


def _text_at(pid: int, address: int) -> str:
    """Returns the text at an address of the memory of a process."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        # A page at most: the next one may not be there.
        data = memory.read(_NAME_BYTES - address % _NAME_BYTES)
    return data.partition(b"\0")[0].decode(errors="backslashreplace").replace("\n", "\\n")
