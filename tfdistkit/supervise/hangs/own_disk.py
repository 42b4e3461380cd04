"""Reports that the launcher itself is blocked by a disk, such as a run folder on an NFS server that died.

Its main thread cannot report that, and cannot stop the job: a thread that touches no file of the job does it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType

from tfdistkit.launcher.local.blocked import SOMETHING, blocked_threads

# A disk that spins up takes a few seconds.
_PATIENCE_S = 10.0
_POLL_S = 1.0
_STDERR = 2


class OwnDiskWatch:
    """Watches the threads of this process while its context is open."""

    def __init__(self) -> None:
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdistkit-own-disk", daemon=True)
        # When each call on a file was first seen, with its thread and how often that had been blocked until then.
        self._since: dict[tuple[int, int, str], float] = {}
        self._reported: set[str] = set()

    def __enter__(self) -> OwnDiskWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(_POLL_S)

    def _run(self) -> None:
        while not self._closed.wait(_POLL_S):
            for call in self._look(time.monotonic()):
                text = (
                    f"tfdistkit: the launcher itself has been blocked in the kernel for {_PATIENCE_S:g} s, {call}: the "
                    "disk does not answer. The job goes on when it does. To end the job now: "
                    f"kill -9 {os.getpid()} (the workers end with it).\n"
                )
                # Not by the console, which may wait for the same disk.
                with contextlib.suppress(OSError):
                    os.write(_STDERR, text.encode(errors="backslashreplace"))

    def _look(self, now: float) -> list[str]:
        """Returns the calls that have blocked a thread for too long, each once."""
        calls = blocked_threads(os.getpid()).items()
        found = [(thread, _switches(thread), call) for thread, call in calls if call != SOMETHING]
        self._since = {one: self._since.get(one, now) for one in found}
        late = {call for one, since in self._since.items() if now - since >= _PATIENCE_S for call in one[2:]}
        late -= self._reported
        self._reported |= late
        return sorted(late)


def _switches(thread: int) -> int:
    """Returns how often a thread has been blocked: many short calls on one file are no long one."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/self/task/{thread}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        return sum(int(line.partition(":")[2]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return 0
