"""Non-blocking sinks: a thread writes, so that a stalled reader does not block the launcher.

A terminal after Ctrl-S, a suspended pager or a full pipe blocks its writer, which then could not handle signals,
deadlines and dead workers.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tfdistkit.launcher.output.sinks import DescriptorSink, Sink, stream_sink

# The maximum size of the queue; beyond it, the workers block.
_MOST_BYTES = 1 << 20
_POLL_S = 0.1
# The size of one write: progress per part tells a slow reader from a stalled one, and writes to a pipe are atomic.
_PART_BYTES = 4096


class Writer(threading.Thread):
    """Writes queued bytes in order. A daemon thread: the process can exit while it blocks on a reader."""

    def __init__(self) -> None:
        super().__init__(name="tfdistkit-console", daemon=True)
        self._queue: collections.deque[tuple[Sink, bytes]] = collections.deque()
        self._bytes = 0
        self._written = 0
        self._changed = threading.Condition()

    def put(self, sink: Sink, data: bytes) -> None:
        """Queues bytes; never blocks."""
        with self._changed:
            self._queue.append((sink, data))
            self._bytes += len(data)
            if self.ident is None:
                self.start()
            self._changed.notify_all()

    def has_room(self, timeout_s: float) -> bool:
        """Waits until the queue is below its limit; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes < _MOST_BYTES, timeout_s)

    def finish(self, idle_s: float, should_stop: Callable[[], bool]) -> bool:
        """Waits until all bytes are written, while the reader makes progress.

        Args:
            idle_s: The timeout without progress, in seconds.
            should_stop: Whether to stop waiting.

        Returns:
            Whether all bytes are written.
        """
        with self._changed:
            written, since = self._written, time.monotonic()
            while self._bytes and not should_stop():
                self._changed.wait(_POLL_S)
                if self._written > written:
                    written, since = self._written, time.monotonic()
                elif time.monotonic() - since > idle_s:
                    break
            return not self._bytes

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                sink, data = self._queue.popleft()
            for begin in range(0, len(data), _PART_BYTES):
                part = data[begin : begin + _PART_BYTES]
                sink.write(part)
                with self._changed:
                    self._bytes -= len(part)
                    self._written += len(part)
                    self._changed.notify_all()


class WaitingSink(Sink):
    """Forwards bytes to another sink in a thread.

    Args:
        sink: The other sink.
        writer: The thread. Sinks with one destination, such as a terminal, share a thread to keep the order.
    """

    def __init__(self, sink: Sink, writer: Writer):
        self._sink, self._writer = sink, writer
        self.is_terminal, self.has_colours = sink.is_terminal, sink.has_colours

    @property
    def problem(self) -> str:  # type: ignore[override]
        return self._sink.problem

    def write(self, data: bytes) -> None:
        if data:
            self._writer.put(self._sink, bytes(data))

    def has_room(self, timeout_s: float) -> bool:
        return self._writer.has_room(timeout_s)

    def finish(self, idle_s: float, should_stop: Callable[[], bool]) -> bool:
        return self._writer.finish(idle_s, should_stop)


def standard_sinks() -> tuple[WaitingSink, WaitingSink]:
    """Returns sinks for the stdout and stderr of this process."""
    stdout, stderr = Writer(), Writer()
    if os.path.samestat(os.fstat(1), os.fstat(2)):
        stderr = stdout
    return WaitingSink(DescriptorSink(1), stdout), WaitingSink(DescriptorSink(2), stderr)


def text_sinks(stdout: TextIO | None, stderr: TextIO | None) -> tuple[WaitingSink, WaitingSink]:
    """Returns sinks for two text streams, such as those of a notebook, which shows both in one cell.

    Args:
        stdout: The stream for stdout.
        stderr: The stream for stderr.
    """
    sinks, writer = (stream_sink(stdout), stream_sink(stderr)), Writer()
    descriptors = [sink.descriptor for sink in sinks if isinstance(sink, DescriptorSink)]
    are_apart = len(descriptors) == 2 and not os.path.samestat(os.fstat(descriptors[0]), os.fstat(descriptors[1]))
    return WaitingSink(sinks[0], writer), WaitingSink(sinks[1], Writer() if are_apart else writer)
