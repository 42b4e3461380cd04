"""Ctrl-Z: notify the agents before this process stops, so that they do not time out."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from tfdistkit.launcher.ssh.connection_pool import ConnectionPool


class SuspendNotifier:
    """Handles SIGTSTP until `close`; does nothing if the process has its own handler, or outside of the main thread.

    Args:
        pool: The connections to notify.
    """

    def __init__(self, pool: ConnectionPool):
        self._pool = pool
        is_main = threading.current_thread() is threading.main_thread()
        self._is_set = is_main and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if self._is_set:
            signal.signal(signal.SIGTSTP, self._stop)

    def close(self) -> None:
        """Restores the default handler."""
        if self._is_set:
            self._is_set = False
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._pool.pause()
        os.kill(os.getpid(), signal.SIGSTOP)
        # Execution resumes here after `fg`.
        self._pool.resume()
