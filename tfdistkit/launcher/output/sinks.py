"""Sinks for the workers' output: a file descriptor of this process, or a notebook's text stream."""

from __future__ import annotations

import codecs
import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO

from tfdistkit import env

# The reader is gone, as after `| head`, or the terminal was closed. Not an error to report.
_READER_LEFT = (errno.EPIPE, errno.ECONNRESET)


class Sink:
    """Accepts bytes. Never raises: a reader that is gone must not end the job."""

    # Whether lines can be overwritten.
    is_terminal = False
    # Whether labels are coloured.
    has_colours = False
    # The first write error, such as a full disk; empty without an error.
    problem = ""

    def write(self, data: bytes) -> None:
        """Writes all of `data`."""
        raise NotImplementedError

    def has_room(self, timeout_s: float) -> bool:
        """Waits until the sink accepts more output; returns whether it does."""
        return True

    def finish(self, idle_s: float, should_stop: Callable[[], bool]) -> bool:
        """Waits until all output is written; gives up after `idle_s` seconds without progress.

        Returns:
            Whether all output is written.
        """
        return True


class DescriptorSink(Sink):
    """Writes to a file descriptor without Python's buffers, which cannot be abandoned when the reader blocks."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._is_open = True
        self._is_tty = os.isatty(descriptor)
        self.is_terminal = self._is_tty and env.text("TERM") != "dumb"
        # https://no-color.org and https://force-color.org
        self.has_colours = env.text(env.NO_COLOR) is None and (
            self.is_terminal or env.text(env.FORCE_COLOR) is not None
        )

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left and self._is_open:
            try:
                left = left[os.write(self.descriptor, left) :]
            except BlockingIOError:
                # Another process made it non-blocking, and it is full.
                select.select([], [self.descriptor], [], 1.0)
            except OSError as error:
                self._is_open = False  # the logs are kept
                if not self._is_tty and error.errno not in _READER_LEFT:
                    self.problem = str(error)


class TextSink(Sink):
    """Writes to a text stream, such as the `sys.stdout` of a notebook."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        # A read may end within a multi-byte character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        try:
            self._stream.write(self._decoder.decode(data))
            self._stream.flush()
        except ValueError:
            pass  # the stream is closed; the logs are complete
        except OSError as error:
            if error.errno not in _READER_LEFT:
                self.problem = str(error)


class NowhereSink(Sink):
    """Discards all bytes."""

    def write(self, data: bytes) -> None:
        pass


def stream_sink(stream: TextIO | None) -> Sink:
    """Returns a sink for a text stream.

    Args:
        stream: Such as `sys.stdout`. This process's own streams are written without their buffers: a thread that
            blocks in them holds a lock that the interpreter needs to exit. None, for a closed descriptor, discards
            all bytes.
    """
    if stream is None:
        return NowhereSink()
    if any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError):  # closed, or without a descriptor
            stream.flush()
            return DescriptorSink(stream.fileno())
    return TextSink(stream)


def open_descriptors() -> None:
    """Opens descriptors 0 to 2 if the caller closed them (`>&-`), so that no log file gets one of these numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
