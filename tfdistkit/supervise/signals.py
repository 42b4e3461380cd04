"""The signals that end a job: Ctrl-C, `kill`, a closed terminal, a preempting scheduler."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType
from typing import Any

# The signals of schedulers, after which workers may make a last backup. SIGUSR1 is SLURM's `--signal=USR1@120`.
BACKUP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ENDING = (signal.SIGINT, signal.SIGHUP, *BACKUP_SIGNALS)


class SignalInbox:
    """Collects the signals that ask this process to end, while it is entered; only in the main thread.

    A signal that was ignored when this process started stays ignored, as `nohup` and background jobs of a shell
    require. Inherited blocked signals are unblocked, and an ignored `SIGCHLD` is reset: the workers would inherit
    both, and the launcher would not see its workers end.

    Args:
        numbers: The signals.
    """

    def __init__(self, numbers: Sequence[int] = _ENDING) -> None:
        self.received: list[int] = []
        self._numbers = numbers
        self._before: dict[int, Any] = {}
        self._mask: Iterable[int] | None = None

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {*self._numbers, signal.SIGCHLD})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
