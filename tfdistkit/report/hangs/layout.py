"""The file of progress notes: where each number stands, and how the launcher reads them."""

from __future__ import annotations

import enum
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

FILE_NAME = "progress"
# The file of stacks, and the signal that asks for them. glibc keeps the first real-time signals for itself; systems
# without them (macOS) have no such request.
STACKS_FILE = "stacks"
STACKS_SIGNAL: int | None = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
# Lines in it that are not faulthandler's: the first one of stacks that py-spy read, and the beginnings of one that
# stands for stacks that are not known, and of one for each file that blocks a thread.
SPIED_STACKS, NO_STACKS, BLOCKED = "Read by py-spy:", "No stack: ", "Blocked in the kernel: "
SIZE_BYTES = 320
# The first number marks a file that is initialized, and the version of its layout.
VERSION = 0x7464_6B02

# Positions of the numbers, of eight bytes each.
PID, MAIN_THREAD, CHANGES, PHASE, SINCE, STEPS, EPOCH, EVALUATED = range(1, 9)
BEGUN, ENDED, RING_BEGUN, RING_ENDED = range(9, 13)
# Two numbers each: for the previous and for the current window.
WINDOW_BEGIN, WINDOW_STEPS = 13, 15
_COUNT = 17
# The collective that was entered last, as text.
CALL_OFFSET, CALL_BYTES = 160, 96
# The threads of a library that poll for peers, as many as there are, then zeros.
POLLING_OFFSET, POLLING_COUNT = 256, 8

_NUMBERS = struct.Struct(f"{_COUNT}q")
_POLLING = struct.Struct(f"{POLLING_COUNT}q")


class Phase(enum.IntEnum):
    """The phases of a process."""

    START = 0  # Its script has made no strategy yet.
    SETUP = 1  # It makes a strategy, or runs code before `fit`.
    STEP = 2
    BETWEEN = 3  # In `fit`, between steps: callbacks, the begin and the end of an epoch.
    EVALUATION = 4
    SAVE = 5
    OUTSIDE = 6  # After `fit`.
    SERVING = 7  # A worker or parameter server, which runs what the coordinator sends.


IN_FIT = (Phase.STEP, Phase.BETWEEN, Phase.EVALUATION, Phase.SAVE)


@dataclass(frozen=True)
class Notes:
    """The progress notes of a process.

    Args:
        pid: The process.
        main_thread: The identifier of its main thread.
        changes: A number that grows with each note, also those of collectives.
        phase: Its current phase.
        since: When the phase began, by `time.monotonic` of its machine.
        steps: The number of its training steps.
        epoch: Its epoch, from 0.
        evaluated: The number of its steps of evaluations and predictions.
        begun: The collectives that it entered, through shared memory.
        ended: Those that have ended.
        ring_begun: The collectives of TensorFlow's own transport that it entered, up to 0.25 s ago.
        ring_ended: Those that have ended.
        call: The collective that it entered last through shared memory, as text.
        window: When the steps that count for `steps_per_s` began, and the number of steps before.
        polling: Its threads that poll for peers all the time: their CPU time is no progress.
    """

    pid: int
    main_thread: int
    changes: int
    phase: Phase
    since: float
    steps: int
    epoch: int
    evaluated: int
    begun: int
    ended: int
    ring_begun: int
    ring_ended: int
    call: str
    window: tuple[float, int]
    polling: tuple[int, ...] = ()

    @property
    def is_in_collective(self) -> bool:
        """Whether it waits in a collective for its peers."""
        return self.begun > self.ended or self.ring_begun > self.ring_ended

    @property
    def begun_steps(self) -> int:
        """The number of training steps that it has begun."""
        return self.steps + (self.phase is Phase.STEP)

    @property
    def has_begun(self) -> bool:
        """Whether its script has made a strategy."""
        return self.phase is not Phase.START or self.changes > 0

    def steps_per_s(self, now: float) -> float | None:
        """Returns its recent steps per second; None before two steps.

        Args:
            now: The time, by `time.monotonic`.
        """
        began, before = self.window
        return (self.steps - before) / (now - began) if began and now > began and self.steps > before else None


def read_notes(folder: Path) -> Notes | None:
    """Returns the notes of a process; None without them.

    Args:
        folder: The folder of the process.
    """
    try:
        data = (folder / FILE_NAME).read_bytes()
    except OSError:
        return None
    return parse_notes(data)


def by_own_clock(data: bytes, ahead_s: float) -> bytes:
    """Returns the content of a file of another machine with the times of this one.

    Args:
        data: The content.
        ahead_s: How far `time.monotonic` of this machine is ahead, in seconds.
    """
    numbers = list(_NUMBERS.unpack_from(data))
    for place in (SINCE, WINDOW_BEGIN, WINDOW_BEGIN + 1):
        numbers[place] += round(ahead_s * 1e9) if numbers[place] else 0
    return _NUMBERS.pack(*numbers) + data[_NUMBERS.size :]


def parse_notes(data: bytes) -> Notes | None:
    """Returns the notes in the content of a file; None if it has none.

    Args:
        data: The content.
    """
    if len(data) < SIZE_BYTES:
        return None
    numbers = _NUMBERS.unpack_from(data)
    if numbers[0] != VERSION or numbers[PHASE] not in iter(Phase):
        return None
    begin = numbers[WINDOW_BEGIN] or numbers[WINDOW_BEGIN + 1]
    before = numbers[WINDOW_STEPS] if numbers[WINDOW_BEGIN] else numbers[WINDOW_STEPS + 1]
    return Notes(
        pid=numbers[PID],
        main_thread=numbers[MAIN_THREAD],
        changes=numbers[CHANGES] + sum(numbers[place] for place in (BEGUN, ENDED, RING_BEGUN, RING_ENDED)),
        phase=Phase(numbers[PHASE]),
        since=numbers[SINCE] / 1e9,
        steps=numbers[STEPS],
        epoch=numbers[EPOCH],
        evaluated=numbers[EVALUATED],
        begun=numbers[BEGUN],
        ended=numbers[ENDED],
        ring_begun=numbers[RING_BEGUN],
        ring_ended=numbers[RING_ENDED],
        call=data[CALL_OFFSET : CALL_OFFSET + CALL_BYTES].rstrip(b"\0").decode(errors="replace"),
        window=(begin / 1e9, before),
        polling=tuple(one for one in _POLLING.unpack_from(data, POLLING_OFFSET) if one),
    )
