"""Notes the progress of this process (step, epoch, phase, collectives) where another process can read it at any time.

The notes are numbers in a mapped file in the folder of the process: a note is a few stores to memory, without a system
call. Without a folder (a script under plain Python) they go to memory of this process alone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from tfdistkit import env
from tfdistkit.report.hangs.layout import (
    BEGUN,
    CALL_BYTES,
    CALL_OFFSET,
    CHANGES,
    ENDED,
    EPOCH,
    EVALUATED,
    FILE_NAME,
    MAIN_THREAD,
    PHASE,
    PID,
    POLLING_COUNT,
    POLLING_OFFSET,
    RING_BEGUN,
    RING_ENDED,
    SINCE,
    SIZE_BYTES,
    STEPS,
    VERSION,
    WINDOW_BEGIN,
    WINDOW_STEPS,
    Phase,
)
from tfdistkit.report.private_files import open_file

# As plain integers, which are read faster.
_STEP, _BETWEEN, _EVALUATION = int(Phase.STEP), int(Phase.BETWEEN), int(Phase.EVALUATION)
# Steps per second are measured over the last one to two windows.
_WINDOW_NS = 10_000_000_000


class ProgressNotes:
    """The notes of one process.

    Args:
        memory: Their memory, of `layout.SIZE_BYTES` zeros.
    """

    def __init__(self, memory: Any):
        self._bytes = memoryview(memory)
        self._numbers: Any = self._bytes.cast("q")
        self._numbers[PID], self._numbers[MAIN_THREAD] = os.getpid(), threading.main_thread().ident or 0
        self._numbers[SINCE] = time.monotonic_ns()
        # Written last, so that a reader knows that the file is complete.
        self._numbers[0] = VERSION

    @property
    def phase(self) -> int:
        """The phase that this process is in."""
        return int(self._numbers[PHASE])

    def enter(self, phase: int) -> int:
        """Notes that a phase begins.

        Args:
            phase: A `Phase`.

        Returns:
            The phase before.
        """
        numbers = self._numbers
        before: int = numbers[PHASE]
        numbers[PHASE], numbers[SINCE] = phase, time.monotonic_ns()
        numbers[CHANGES] += 1
        return before

    def count_steps(self, steps: int) -> None:
        """Counts training steps that have ended, and begins the phase between steps."""
        numbers, now = self._numbers, time.monotonic_ns()
        numbers[STEPS] += steps
        numbers[PHASE], numbers[SINCE] = _BETWEEN, now
        numbers[CHANGES] += 1
        if now - numbers[WINDOW_BEGIN + 1] > _WINDOW_NS:
            numbers[WINDOW_BEGIN], numbers[WINDOW_STEPS] = numbers[WINDOW_BEGIN + 1], numbers[WINDOW_STEPS + 1]
            numbers[WINDOW_BEGIN + 1], numbers[WINDOW_STEPS + 1] = now, numbers[STEPS]

    def count_evaluation(self) -> None:
        """Notes that a step of an evaluation or prediction has ended."""
        self._numbers[EVALUATED] += 1
        self._numbers[CHANGES] += 1

    def begin_epoch(self, epoch: int) -> None:
        """Notes the epoch, counted from 0."""
        self._numbers[EPOCH] = epoch
        self._numbers[CHANGES] += 1

    def begin_operation(self, call: bytes) -> None:
        """Notes that this process entered a collective; called by the thread that runs them.

        Args:
            call: Its description, such as `sum of float32 [3]`.
        """
        text = call[:CALL_BYTES].ljust(CALL_BYTES, b"\0")
        self._bytes[CALL_OFFSET : CALL_OFFSET + CALL_BYTES] = text
        self._numbers[BEGUN] += 1

    def end_operation(self) -> None:
        """Notes that a collective has ended."""
        self._numbers[ENDED] += 1

    def note_ring(self, begun: int, ended: int) -> None:
        """Notes how many of TensorFlow's own collectives have begun and ended."""
        self._numbers[RING_BEGUN], self._numbers[RING_ENDED] = begun, ended

    def note_polling(self, threads: Collection[int]) -> None:
        """Notes native threads of a library that poll for peers all the time, also while this process waits."""
        for place, thread in enumerate(sorted(threads)[:POLLING_COUNT]):
            self._numbers[POLLING_OFFSET // 8 + place] = thread


own = ProgressNotes(bytearray(SIZE_BYTES))


def begin() -> None:
    """Begins to write the notes into the folder of this process, if it has one; before other modules use `own`."""
    global own
    folder = env.text(env.TASK_DIR)
    if folder is not None:
        # The job can train without notes (a full disk, a file system that does not support mappings).
        with contextlib.suppress(OSError, ValueError):
            own = ProgressNotes(_mapped(Path(folder, FILE_NAME)))


def _mapped(path: Path) -> mmap.mmap:
    """Creates a file of zeros and maps it. No sparse file: on a full disk, a store to a hole would kill the process."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # Another process may still have the old one mapped.
    os.close(open_file(path, os.O_EXCL))
    with open(path, "r+b") as file:
        file.write(bytes(SIZE_BYTES))
        file.flush()
        return mmap.mmap(file.fileno(), SIZE_BYTES)


@contextlib.contextmanager
def noting(phase: int) -> Iterator[None]:
    """Notes a phase for the time of its body.

    Args:
        phase: A `Phase`.
    """
    before = own.enter(phase)
    try:
        yield
    finally:
        own.enter(before)


@contextlib.contextmanager
def noting_polling() -> Iterator[None]:
    """Notes the threads that its body starts, which poll for peers."""
    before = _own_threads()
    try:
        yield
    finally:
        own.note_polling(_own_threads() - before)


def _own_threads() -> set[int]:
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:  # no Linux
        return set()


def noting_steps(function: Callable[[Any], Any], steps: int | None) -> Callable[[Any], Any]:
    """Wraps a function that Keras calls for each execution of steps.

    Args:
        function: The function.
        steps: The training steps in one execution; None for steps of an evaluation or prediction.
    """
    notes, count = own, steps or 1

    def noted_train(iterator: Any) -> Any:
        notes.enter(_STEP)
        try:
            result = function(iterator)
        except BaseException:  # Also at the end of data whose length Keras does not know.
            notes.enter(_BETWEEN)
            raise
        notes.count_steps(count)
        return result

    def noted_evaluation(iterator: Any) -> Any:
        before = notes.enter(_EVALUATION)
        try:
            return function(iterator)
        finally:
            notes.count_evaluation()
            notes.enter(before)

    return noted_evaluation if steps is None else noted_train
