"""The watchdog: kills a job's processes when its launcher has died, also after kill -9 or out of memory.

The launcher starts this file as a process in its own session, and holds the other end of its stdin. It writes
`+<group>` when a worker has started and `-<group>` when its process group is gone. The kernel closes the pipe when the
launcher ends; then the watchdog kills the remaining process groups, and every process with the job's mark in its
environment, which covers processes that moved into a session of their own.

It runs without site-packages, to start within milliseconds: imports only the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable

# Poll interval for the launcher's death: a process that it forked can hold the pipe open.
_POLL_S = 1.0
# A killed process ends in milliseconds, unless it hangs in the kernel: then it ends when its disk answers.
_KILL_DEADLINE_S = 5.0
_IN_KERNEL_S = 1.0


def group_members(group: int) -> list[int]:
    """Returns the living processes of a process group, without zombies."""
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
    """Returns the living processes with `mark` (`NAME=value`) in their environment, except this one."""
    wanted = mark.encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and wanted in _variables(pid)]


def kill_all(groups: Iterable[int], mark: str) -> None:
    """Kills process groups and all marked processes, and waits until they are gone, or all blocked in the kernel."""
    groups = list(groups)
    began = time.monotonic()
    while (elapsed_s := time.monotonic() - began) < _KILL_DEADLINE_S:
        # Repeated: a process may have forked before it was killed.
        pids = {pid for group in groups for pid in group_members(group)} | set(marked_processes(mark))
        if not pids:
            return
        for pid in pids:
            _kill(pid)
        if elapsed_s > _IN_KERNEL_S and all(process_state(pid) in ("D", "") for pid in pids):
            return
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
    """Returns the state and the process group; 0 as the group of a zombie.

    See proc_pid_stat(5): the name in parentheses can contain any character.
    """
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
    """Waits until the launcher is gone, and kills the remaining processes of its job.

    Args:
        launcher: The launcher's process id, the parent of this process; it holds the other end of its stdin.
        mark: `NAME=value`, which is set in the environment of all processes of the job.
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
