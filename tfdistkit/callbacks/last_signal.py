"""Handles signals that announce the end of this process, within a grace period."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from types import FrameType
from typing import Any

from tfdistkit import env
from tfdistkit.callbacks.process_group import warn_once

# SIGTERM: `kill`, Kubernetes, SLURM at the time limit, a launcher. SIGUSR1: SLURM's `--signal=USR1@120`.
_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)
_active: weakref.WeakSet[LastSignal] = weakref.WeakSet()


_masks = threading.local()


def _block_before_fork() -> None:
    """Blocks the signals until the forked process has its own handlers back.

    A signal in between (a pool that ends its processes as they start) would be recorded there and lost, and would wake
    the watchdog of this process.
    """
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS) if _active else None


def _unblock() -> None:
    if _masks.before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _leave_in_child() -> None:
    """Gives a forked process its own signals back: it would write to the pipe of this one, and ignore SIGTERM."""
    for one in list(_active):
        one.leave()
    _unblock()


os.register_at_fork(before=_block_before_fork, after_in_parent=_unblock, after_in_child=_leave_in_child)


class LastSignal:
    """Records a signal instead of exiting at once; a watchdog thread exits after the grace period.

    A process that waits in TensorFlow for a dead peer runs no Python in its main thread, so only a thread can end it.
    In an elastic job SIGUSR1 is a request: no process ends by it unless all have made a backup.

    Args:
        grace_s: Seconds from the signal until the process exits in any case; None installs no handlers.
    """

    def __init__(self, grace_s: float | None):
        self._grace_s = grace_s
        self.number = 0
        self._request = signal.SIGUSR1 if env.text(env.ELASTIC) is not None else None
        self._before: dict[int, Any] = {}
        self._done = threading.Event()
        self._read_end = self._write_end = self._wakeup_before = -1

    def __enter__(self) -> LastSignal:
        if self._grace_s is None:
            return self
        if threading.current_thread() is not threading.main_thread():
            warn_once("BackupAndResume cannot save on signals: Python handles signals only in the main thread.")
            return self
        for number in _NUMBERS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None) or number == self._request:
                self._before[number] = signal.signal(number, self._record)
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        # The C handler writes to it even while the main thread runs no Python.
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="tfdistkit-last-signal", daemon=True).start()
        _active.add(self)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._write_end < 0:
            return
        _active.discard(self)
        self._restore_handlers()
        self._done.set()
        os.close(self._write_end)
        self._write_end = -1

    def leave(self) -> None:
        """Restores the handlers in a forked process, which has the pipe, but not the thread that reads it."""
        self._restore_handlers()
        os.close(self._write_end)
        os.close(self._read_end)
        self._write_end = -1

    def _restore_handlers(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def drop_request(self) -> None:
        """Forgets a request for a backup that `fit` came to its end before."""
        if self.number == self._request:
            self.number = 0

    def end(self, number: int) -> None:
        """Ends this process by a signal, with the handlers that were installed before."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.__exit__()
        self.number = 0
        if number == self._request:
            signal.signal(number, signal.SIG_DFL)  # ignored outside of `fit`
        os.kill(os.getpid(), number)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if not (number == self._request and self.number):  # a request does not replace a signal that ends the process
            self.number = number

    def _watch(self) -> None:
        number = 0
        while number not in self._before:
            received = os.read(self._read_end, 1)
            if not received:
                break
            number = 0 if received[0] == self._request else received[0]
        os.close(self._read_end)
        if number and not self._done.wait(self._grace_s):
            with contextlib.suppress(Exception):
                print(
                    f"tfdistkit: no backup within {self._grace_s:g} s of {signal.Signals(number).name}",
                    file=sys.stderr,
                    flush=True,
                )
            os._exit(128 + number)
