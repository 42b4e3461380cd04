"""Where the workers' output is shown: a file descriptor of this process, or a notebook's text stream."""

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

# Nobody reads any more, as after `| head`, or the terminal was closed: the user knows.
_READER_LEFT = (errno.EPIPE, errno.ECONNRESET)


class Sink:
    """Takes bytes. It never raises: a reader that went away must not take the job down."""

    # Whether a line there can be overwritten.
    is_terminal = False
    # Whether labels are shown in colours there.
    has_colours = False
    # Why something could not be written, such as a full disk; empty while all is well.
    problem = ""

    def write(self, data: bytes) -> None:
        """Takes all of `data`."""
        raise NotImplementedError

    def has_room(self, timeout_s: float) -> bool:
        """Whether it can take more, now or before the time is over."""
        return True

    def finish(self, idle_s: float, should_stop: Callable[[], bool]) -> bool:
        """Waits until all is written; gives up after so many seconds without a byte, or in a should_stop.

        Returns:
            Whether all is written.
        """
        return True


class DescriptorSink(Sink):
    """Writes to a file descriptor, past Python's buffers: those cannot be given up when the reader blocks."""

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
                # Somebody made it non-blocking, and it is full.
                select.select([], [self.descriptor], [], 1.0)
            except OSError as error:
                self._is_open = False  # the logs are kept
                if not self._is_tty and error.errno not in _READER_LEFT:
                    self.problem = str(error)


class TextSink(Sink):
    """Writes to a text stream, such as the `sys.stdout` of a notebook."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        # A character can be cut in two between two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        try:
            self._stream.write(self._decoder.decode(data))
            self._stream.flush()
        except ValueError:
            pass  # closed: what the workers wrote is in their logs
        except OSError as error:
            if error.errno not in _READER_LEFT:
                self.problem = str(error)


class NowhereSink(Sink):
    """Takes everything, and shows nothing."""

    def write(self, data: bytes) -> None:
        pass


def stream_sink(stream: TextIO | None) -> Sink:
    """Returns a sink for a text stream.

    Args:
        stream: Such as `sys.stdout`. This process's own is written to past its buffers: while a thread waits there for
            a reader, it holds a lock that the interpreter needs to end. None, as where the descriptor is closed, takes
            everything and shows nothing.
    """
    if stream is None:
        return NowhereSink()
    if any(stream is own for own in (sys.__stdout__, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError):  # it is closed, or has no descriptor
            stream.flush()
            return DescriptorSink(stream.fileno())
    return TextSink(stream)


def open_descriptors() -> None:
    """Opens 0 to 2 where the caller closed them (`>&-`): what is opened next, such as a log, would be taken for one."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
