"""Handles one connection on rank 0's side of a rendezvous."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from tfdistkit.cluster.addresses import join_address
from tfdistkit.cluster.rendezvous import protocol as wire
from tfdistkit.cluster.rendezvous.secret import SERVER, Session, new_nonce

# Timeout of a send in seconds: it blocks the rendezvous of all ranks.
_SEND_S = 5.0


class PeerConnection:
    """Reads and writes messages on a connection, which belongs to a rank once `hello` is set.

    Args:
        connection: The accepted connection.
        peer: The remote address that `accept` returned.
    """

    def __init__(self, connection: socket.socket, peer: tuple[str, int]):
        connection.setblocking(False)
        self.socket = connection
        # IPv4-mapped IPv6 addresses are shown as IPv4.
        self.address = join_address(peer[0].removeprefix("::ffff:"), peer[1])
        self.ip = peer[0]
        self.opened_at = time.monotonic()
        self.session: Session | None = None
        self.hello: wire.Hello | None = None
        self.was_asked = False
        self.is_ready = False
        self._buffer = b""

    @property
    def is_open(self) -> bool:
        """Returns whether this end is still open."""
        return self.socket.fileno() >= 0

    @property
    def unread(self) -> str:
        """Returns the start of an incomplete line, for messages."""
        return wire.shown(self._buffer) if self._buffer else "nothing"

    def lines(self) -> Iterator[bytes]:
        """Reads the available bytes and yields all complete lines.

        Raises:
            ConnectionError: if the other end has closed.
            NotOurs: if a line is longer than any valid message.
        """
        try:
            part = self.socket.recv(65536)
        except BlockingIOError:
            return
        if not part:
            raise ConnectionResetError
        *lines, self._buffer = (self._buffer + part).split(b"\n")
        yield from lines
        if len(self._buffer) > wire.LONGEST_HELLO_BYTES:
            raise wire.NotOurs(f"an endless line: {self.unread}")

    def challenge(self, secret: bytes, client_nonce: str) -> bool:
        """Answers a knock, from where on messages are signed; returns whether it was sent."""
        nonce = new_nonce()
        self.session = Session(secret, client_nonce, nonce, SERVER)
        return self.send(wire.encode("challenge", nonce=nonce))

    def send(self, message: bytes) -> bool:
        """Sends a message, signed after the challenge; returns whether it was sent."""
        try:
            self.socket.settimeout(_SEND_S)
            self.socket.sendall(self.session.sign(message) if self.session else message)
            self.socket.setblocking(False)
        except OSError:
            return False
        return True

    def is_gone(self) -> bool:
        """Returns whether the other end has closed, even before the end is read."""
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def wait_for_close(self, until: float) -> None:
        """Waits until the other end has closed, or until the time `until` of `time.monotonic`."""
        with contextlib.suppress(OSError):
            while (left_s := until - time.monotonic()) > 0:
                self.socket.settimeout(left_s)
                if not self.socket.recv(65536):
                    return
