"""CPU time and input/output of a process and its children: what shows that one without progress notes still works."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tfdistkit.launcher.local.watchdog import group_members, process_state

# A rank that waits in a collective uses up to 1 % of a core (its polling threads); one that works on a machine with
# twenty times as many busy processes as cores gets 5 %.
_BUSY_SHARE = 0.05
# The kernel counts CPU time in steps of 10 ms, so fewer of them are chance.
_FEWEST_TICKS = 3
# A rank that waits for data uses up to 20 % of a core for what it does in short steps, and for its collectives.
_COMPUTING_SHARE = 0.3
# Polling threads read and write a few bytes at a time.
_BUSY_BYTES = 1 << 16
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Activity:
    """The work of a process and its process group between two looks.

    Args:
        pid: The process.

    Attributes:
        polling: Its threads that poll for peers all the time (Horovod's): their work does not count.
    """

    def __init__(self, pid: int):
        self.pid = pid
        self.polling: tuple[int, ...] = ()
        self._before: dict[int, tuple[int, int]] = {}
        self._ticks = 0

    def is_busy(self, elapsed_s: float) -> bool:
        """Returns whether the process has worked since the last call; a debugger that holds it counts as work.

        Args:
            elapsed_s: The time since the last call, in seconds.
        """
        if process_state(self.pid) == "t":
            return True
        now = {pid: self._used(pid) for pid in self._processes()}
        # Only those that were there before: what a new one counts may be older than the last look.
        pairs = [(now[pid], self._before[pid]) for pid in now if pid in self._before]
        self._before = now
        ticks = sum(max(0, one[0] - before[0]) for one, before in pairs)
        size_bytes = sum(max(0, one[1] - before[1]) for one, before in pairs)
        is_computing = ticks >= max(_FEWEST_TICKS, _BUSY_SHARE * elapsed_s * _TICKS_PER_S)
        return is_computing or size_bytes >= _BUSY_BYTES

    def is_computing(self, elapsed_s: float) -> bool:
        """Returns whether the process alone, without children, used 30 % of a core since the last call.

        Args:
            elapsed_s: The time since the last call, in seconds.
        """
        before, (self._ticks, _) = self._ticks, self._used(self.pid)
        return self._ticks - before >= _COMPUTING_SHARE * elapsed_s * _TICKS_PER_S

    def _used(self, pid: int) -> tuple[int, int]:
        """Returns the CPU time in ticks, with that of children that have ended, and the bytes read and written."""
        ticks, size_bytes = _used(f"/proc/{pid}")
        for thread in self.polling if pid == self.pid else ():
            more_ticks, more_bytes = _used(f"/proc/{pid}/task/{thread}")
            ticks, size_bytes = ticks - more_ticks, size_bytes - more_bytes
        return ticks, size_bytes

    def _processes(self) -> list[int]:
        with contextlib.suppress(OSError):
            if os.getpgid(self.pid) == self.pid:
                return group_members(self.pid)
        return [self.pid]  # Processes of other ranks are in its group, as under mpirun.


def _used(folder: str) -> tuple[int, int]:
    return _ticks(f"{folder}/stat"), _bytes(f"{folder}/io")


def _ticks(path: str) -> int:
    try:
        fields = Path(path).read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime: see proc_pid_stat(5)


def _bytes(path: str) -> int:
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))
