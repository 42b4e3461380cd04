"""Ctrl-Z: the hosts are told before this process stops, so that they do not take it for dead."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from tfdistkit.launcher.ssh.connection_pool import ConnectionPool


class SuspendNotifier:
    """Answers SIGTSTP until `close`; does nothing where this process has an answer of its own, or in a thread.

    Args:
        pool: Who is told.
    """

    def __init__(self, pool: ConnectionPool):
        self._pool = pool
        is_main = threading.current_thread() is threading.main_thread()
        self._is_set = is_main and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
        if self._is_set:
            signal.signal(signal.SIGTSTP, self._stop)

    def close(self) -> None:
        """Gives the signal back."""
        if self._is_set:
            self._is_set = False
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._pool.pause()
        os.kill(os.getpid(), signal.SIGSTOP)
        # Here it goes on after `fg`.
        self._pool.resume()
