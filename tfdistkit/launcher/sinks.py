"""Where the workers' output is shown: a file descriptor of this process, or a notebook's text stream."""

from __future__ import annotations

import codecs
import os
import select
from typing import Protocol, TextIO

from tfdistkit import env


class Sink(Protocol):
    """Takes bytes. It never raises: a reader that went away must not take the job down."""

    @property
    def is_terminal(self) -> bool:
        """Whether a line there can be overwritten."""

    def write(self, data: bytes) -> None:
        """Writes all of `data`, at once where that is possible."""


class DescriptorSink:
    """Writes to a file descriptor, past Python's buffers: those cannot be given up when the reader blocks."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._is_open = True
        self.is_terminal = os.isatty(descriptor) and env.text("TERM") != "dumb"

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left and self._is_open:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                # Somebody made it non-blocking, and it is full.
                select.select([], [self._descriptor], [], 1.0)
            except OSError:
                self._is_open = False  # nobody reads any more, or the terminal is gone; the logs are kept


class TextSink:
    """Writes to a text stream, such as the `sys.stdout` of a notebook."""

    is_terminal = False

    def __init__(self, stream: TextIO):
        self._stream = stream
        # A character can be cut in two between two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, data: bytes) -> None:
        try:
            self._stream.write(self._decoder.decode(data))
            self._stream.flush()
        except (OSError, ValueError):
            pass  # closed: what the workers wrote is in their logs
