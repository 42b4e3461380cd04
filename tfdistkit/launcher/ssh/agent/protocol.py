"""Messages between the launcher and its agents: a line of JSON, followed by a payload of the size that it names.

Neither side blocks on a write: unwritten bytes wait in an outbox.
"""

from __future__ import annotations

import json
import os
from typing import Any

# The first output of an agent. A login shell may print something before.
GREETING = b"\0tfdistkit agent\0\n"
# Flow control: the maximum number of bytes in flight per stream of a worker.
WINDOW_BYTES = 256 * 1024

_LONGEST_LINE_BYTES = 64 * 1024 * 1024
_READ_BYTES = 65_536

Message = dict[str, Any]


class ProtocolError(Exception):
    """The received bytes are not a message of this protocol."""


def encode(message: Message, payload: bytes = b"") -> bytes:
    """Encodes a message.

    Args:
        message: The message, serializable as JSON.
        payload: The bytes that follow it.
    """
    if payload:
        message = {**message, "size": len(payload)}
    return json.dumps(message).encode() + b"\n" + payload


class Decoder:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._unread = b""
        self._waiting: Message | None = None

    def push(self, data: bytes) -> list[tuple[Message, bytes]]:
        """Adds the next bytes, and returns the messages that they complete, each with its payload.

        Args:
            data: The next part of the stream, of any size.

        Raises:
            ProtocolError: if the stream is not one of messages.
        """
        self._unread += data
        found: list[tuple[Message, bytes]] = []
        while True:
            if self._waiting is None:
                line, newline, rest = self._unread.partition(b"\n")
                if not newline:
                    if len(self._unread) > _LONGEST_LINE_BYTES:
                        raise ProtocolError("a line without an end")
                    return found
                self._unread = rest
                self._waiting = _parse(line)
            size = self._waiting.get("size", 0)
            if len(self._unread) < size:
                return found
            found.append((self._waiting, self._unread[:size]))
            self._unread = self._unread[size:]
            self._waiting = None


class Outbox:
    """Bytes to be written to a non-blocking file descriptor."""

    def __init__(self, descriptor: int):
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._left = bytearray()
        self.is_broken = False

    @property
    def is_empty(self) -> bool:
        """Whether all bytes are written; a broken outbox is empty."""
        return not self._left

    def put(self, data: bytes) -> None:
        """Queues bytes for `flush`."""
        if not self.is_broken:
            self._left += data

    def flush(self) -> int:
        """Writes as many bytes as the descriptor accepts; returns their number."""
        written = 0
        try:
            while self._left:
                count = os.write(self.descriptor, memoryview(self._left)[:_READ_BYTES])
                del self._left[:count]
                written += count
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone
            self.is_broken = True
            self._left.clear()
        return written


def read_now(descriptor: int) -> bytes | None:
    """Reads the available bytes.

    Args:
        descriptor: A non-blocking file descriptor.

    Returns:
        The bytes; empty at the end of the stream, or if it is broken; None if there are none now.
    """
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _parse(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError:
        raise ProtocolError(repr(line[:200])) from None
    size = message.get("size", 0) if isinstance(message, dict) else None
    if not isinstance(size, int) or size < 0:
        raise ProtocolError(repr(line[:200]))
    return message
