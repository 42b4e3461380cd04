"""The signals that end a job: Ctrl-C, `kill`, a closed terminal, a scheduler that wants the machine back."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

# Those of schedulers: the workers may make a last backup. SIGUSR1 is SLURM's `--signal=USR1@120`.
BACKUP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ENDING = (signal.SIGINT, signal.SIGHUP, *BACKUP_SIGNALS)


class SignalInbox:
    """Collects the signals that ask this process to end, while it is entered; main thread only.

    A signal that was ignored when this process started stays ignored, as `nohup` and background jobs of a
    shell want it.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
