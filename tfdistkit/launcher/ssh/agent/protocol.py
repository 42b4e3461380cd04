"""Messages between the launcher and its agents on hosts: a line of JSON, and as many bytes after it as it says.

Neither side ever waits to write: what the other one does not take yet stays in an outbox.
"""

from __future__ import annotations

import json
import os
from typing import Any

# What an agent says first. A login shell may have printed something before.
GREETING = b"\0tfdistkit agent\0\n"
# So many bytes of one stream of a worker may be on their way to the launcher.
WINDOW_BYTES = 256 * 1024

_LONGEST_LINE_BYTES = 64 * 1024 * 1024
_READ_BYTES = 65_536

Message = dict[str, Any]


class ProtocolError(Exception):
    """What came is none of our messages."""


def encode(message: Message, payload: bytes = b"") -> bytes:
    """Puts a message into bytes.

    Args:
        message: Anything that JSON can hold.
        payload: Bytes that belong to it.
    """
    if payload:
        message = {**message, "size": len(payload)}
    return json.dumps(message).encode() + b"\n" + payload


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._unread = b""
        self._waiting: Message | None = None

    def push(self, data: bytes) -> list[tuple[Message, bytes]]:
        """Takes the next bytes, and returns the messages that they complete, each with what belongs to it.

        Args:
            data: Any part of the stream.

        Raises:
            ProtocolError: if it is no stream of messages.
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
    """What is to be written to a file descriptor, as far as the other side has not taken it yet."""

    def __init__(self, descriptor: int):
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._left = bytearray()
        self.is_broken = False

    @property
    def is_empty(self) -> bool:
        """Whether all is written; a broken one is empty."""
        return not self._left

    def put(self, data: bytes) -> None:
        """Adds bytes; `flush` writes them."""
        if not self.is_broken:
            self._left += data

    def flush(self) -> int:
        """Writes what the other side takes now; returns how many bytes."""
        written = 0
        try:
            while self._left:
                count = os.write(self.descriptor, memoryview(self._left)[:_READ_BYTES])
                del self._left[:count]
                written += count
        except BlockingIOError:
            pass
        except OSError:  # nobody reads any more
            self.is_broken = True
            self._left.clear()
        return written


def read_now(descriptor: int) -> bytes | None:
    """Reads what is there.

    Args:
        descriptor: One that does not block.

    Returns:
        Bytes; none at the end of the stream, or when it is broken; None when there is nothing now.
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
