"""What the engines of the ranks tell each other, and the sockets that carry it."""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tfdistkit.collectives.shm import peers

# A rank to rank 0: an operation was called; with its data, or without, where they are too large.
POST = 1
# Rank 0 to all: the result of an operation whose data were sent; the start of another one.
REPLY, GO = 2, 3
# A rank to all: it has taken a step of the operation under way.
STEP = 4
# Rank 0 to all: an operation failed. Any rank to all: no operation can succeed any more.
FAILED, BROKEN = 5, 6

_HEADER = struct.Struct("<BxxxIQQ")  # kind, count of the tag, tag, bytes that follow
_POST = struct.Struct("<dII?")  # timeout in seconds, bytes of the call, numbers of the meta, whether data follow
_METAS = struct.Struct("<II")  # ranks, numbers of each
_RECEIVE_BYTES = 1 << 18

# An operation: its tag, and how many with this tag were before it.
Key = tuple[int, int]


class LostPeer(Exception):
    """A rank ended while others needed it."""


class TimedOut(Exception):
    """Some ranks did not call an operation in time."""


class Mismatch(Exception):
    """The ranks called one operation with other arguments."""


FAILURES: dict[bytes, type[Exception]] = {b"lost": LostPeer, b"late": TimedOut, b"call": Mismatch}
FAILURE_NAMES = {kind: name for name, kind in FAILURES.items()}


@dataclass(frozen=True)
class Post:
    """A rank's call of an operation.

    Args:
        timeout_s: Seconds that the rank waits.
        call: See `Operation`.
        meta: See `Operation`.
        data: The rank's data; None if they are too large to be sent.
    """

    timeout_s: float
    call: bytes
    meta: np.ndarray
    data: bytes | None

    def packed(self) -> bytes:
        head = _POST.pack(self.timeout_s, len(self.call), len(self.meta), self.data is not None)
        return head + self.call + self.meta.tobytes() + (self.data or b"")

    @classmethod
    def unpacked(cls, body: bytes) -> Post:
        timeout_s, length, numbers, has_data = _POST.unpack_from(body)
        at = _POST.size + length
        meta = np.frombuffer(body[at : at + 8 * numbers], np.int64)
        return cls(timeout_s, body[_POST.size : at], meta, body[at + 8 * numbers :] if has_data else None)


def pack_metas(metas: Sequence[np.ndarray]) -> bytes:
    """Returns the metas of all ranks as bytes."""
    return _METAS.pack(len(metas), len(metas[0])) + b"".join(meta.tobytes() for meta in metas)


def unpack_metas(body: bytes) -> tuple[list[np.ndarray], bytes]:
    """Returns the metas of all ranks, and what follows them."""
    ranks, numbers = _METAS.unpack_from(body)
    end = _METAS.size + 8 * ranks * numbers
    return list(np.frombuffer(body[_METAS.size : end], np.int64).reshape(ranks, numbers)), body[end:]


class Gathering:
    """What rank 0 knows of an operation that not all ranks have called yet."""

    def __init__(self) -> None:
        self.deadline, self.timeout_s = math.inf, 0.0  # The earliest of the ranks that called it.
        self.posts: dict[int, Post] = {}
        self.posted_at = -math.inf  # When the last of them did.


class Connection:
    """A socket to another rank, which never blocks: what cannot be sent at once waits.

    Args:
        connected: The socket.
    """

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        self.socket = connected
        self.is_open = True
        self._process = peers.process_of(connected)
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def is_waiting(self) -> bool:
        """Whether something is left to send."""
        return bool(self._unsent)

    def is_suspended(self) -> bool:
        """Whether the process at the other end does not run, for a signal such as SIGSTOP."""
        try:
            # The name, which comes before the state, may hold anything, brackets too.
            state = Path(f"/proc/{self._process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):  # It has ended, or is in another namespace.
            return False
        return state == "T"

    def send(self, kind: int, key: Key = (0, 0), body: bytes = b"") -> None:
        """Sends a message, or as much of it as the socket takes."""
        tag, count = key
        self._unsent += _HEADER.pack(kind, count, tag, len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Sends more of what is left to send."""
        try:
            while self._unsent and self.is_open:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # The peer is gone; what it sent before is still to be read.
            self._unsent.clear()

    def receive(self) -> list[tuple[int, Key, bytes]]:
        """Returns the messages that are there; closes the connection at its end."""
        try:
            while True:
                piece = self.socket.recv(_RECEIVE_BYTES)
                self._received += piece
                if not piece:
                    self.is_open = False
                if len(piece) < _RECEIVE_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False
        return self._messages()

    def _messages(self) -> list[tuple[int, Key, bytes]]:
        messages, at = [], 0
        while len(self._received) - at >= _HEADER.size:
            kind, count, tag, length = _HEADER.unpack_from(self._received, at)
            end = at + _HEADER.size + length
            if len(self._received) < end:
                break
            messages.append((kind, (tag, count), bytes(self._received[at + _HEADER.size : end])))
            at = end
        del self._received[:at]
        return messages
