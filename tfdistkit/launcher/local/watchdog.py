"""Ends a job's processes when its launcher is gone, however that went (kill -9, out of memory).

The launcher starts this file as a process in a session of its own and holds the other end of its stdin. The
launcher writes `+<group>` when a worker was started and `-<group>` when its process group is gone; the kernel closes
the pipe when the launcher ends, and then whatever is left is killed. What is left: the process groups of the workers,
and every process that carries the job's mark among its variables, which finds those that moved into a session of
their own.

It runs without site-packages, so that it is there within milliseconds: only the standard library is imported.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable

# The pipe can be held open by a process that the launcher forked itself, so its death is looked for too.
_POLL_S = 1.0
# Killed processes are gone in milliseconds, or they hang in the kernel and nobody can help.
_KILL_DEADLINE_S = 5.0


def group_members(group: int) -> list[int]:
    """Returns the living processes of a process group: zombies, which are nobody any more, do not count."""
    if os.path.isdir("/proc/self"):
        return [pid for pid in _all_pids() if _state_and_group(pid)[1] == group]
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    except PermissionError:
        pass
    return [group]


def marked_processes(mark: str) -> list[int]:
    """Returns the living processes that have `mark` (`NAME=value`) among their variables, this one excepted."""
    wanted = mark.encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and wanted in _variables(pid)]


def kill_all(groups: Iterable[int], mark: str) -> None:
    """Kills process groups and all marked processes, and returns when they are gone."""
    groups = list(groups)
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while time.monotonic() < deadline:
        # Again and again: one of them may have been about to start another.
        pids = {pid for group in groups for pid in group_members(group)} | set(marked_processes(mark))
        if not pids:
            return
        for pid in pids:
            _kill(pid)
        time.sleep(0.01)


def process_state(pid: int) -> str:
    """Returns the kernel's letter for a process (`R`, `S`, `T` for stopped, ...); empty when it is gone or unknown."""
    return _state_and_group(pid)[0]


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _state_and_group(pid: int) -> tuple[str, int]:
    """A zombie belongs to no group here. See proc_pid_stat(5): the name in parentheses can hold anything."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", 0
    state = fields[0].decode()
    return (state, 0) if state in "ZX" else (state, int(fields[2]))


def _variables(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def guard(launcher: int, mark: str) -> None:
    """Waits until a launcher is gone, and kills what is left of its job.

    Args:
        launcher: Its process, the parent of this one; it holds the other end of this one's stdin.
        mark: `NAME=value`, which all processes of the job have among their variables.
    """
    groups: set[int] = set()
    unread = b""
    while os.getppid() == launcher:
        if not select.select([0], [], [], _POLL_S)[0]:
            continue
        data = os.read(0, 4096)
        if not data:
            break
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            if line[:1] in (b"+", b"-") and line[1:].isdigit():
                (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
    kill_all(groups, mark)


if __name__ == "__main__":
    for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_number, signal.SIG_IGN)
    guard(launcher=int(sys.argv[1]), mark=sys.argv[2])
