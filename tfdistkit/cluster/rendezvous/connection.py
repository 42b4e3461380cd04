"""One connection to rank 0 during a rendezvous, as rank 0 sees it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

from tfdistkit.cluster.addresses import join_address
from tfdistkit.cluster.rendezvous import protocol as wire
from tfdistkit.cluster.rendezvous.secret import HOST, Session, new_nonce

# No single send may hold everybody up longer.
_SEND_S = 5.0


class Visitor:
    """A stranger until it has said hello with the job's secret; then one of the ranks.

    Args:
        connection: The accepted connection.
        peer: Where it comes from, as `accept` says.
    """

    def __init__(self, connection: socket.socket, peer: tuple[str, int]):
        connection.setblocking(False)
        self.connection = connection
        # An IPv4 address that came through an IPv6 socket is shown as people write it.
        self.peer = join_address(peer[0].removeprefix("::ffff:"), peer[1])
        self.ip = peer[0]
        self.since = time.monotonic()
        self.session: Session | None = None
        self.hello: wire.Hello | None = None
        self.asked = False
        self.ready = False
        self._buffer = b""

    @property
    def is_open(self) -> bool:
        """Whether this end is still open."""
        return self.connection.fileno() >= 0

    @property
    def said(self) -> str:
        """The beginning of what came and was not yet a whole line."""
        return wire.shown(self._buffer) if self._buffer else "nothing"

    def lines(self) -> Iterator[bytes]:
        """Reads what is there and yields the whole lines.

        Raises:
            ConnectionError: if the other end has closed.
            NotOurs: if a line is longer than any of ours.
        """
        try:
            part = self.connection.recv(65536)
        except BlockingIOError:
            return
        if not part:
            raise ConnectionResetError
        *lines, self._buffer = (self._buffer + part).split(b"\n")
        yield from lines
        if len(self._buffer) > wire.LONGEST_HELLO_BYTES:
            raise wire.NotOurs(f"an endless line: {self.said}")

    def challenge(self, secret: bytes, guest_nonce: str) -> bool:
        """Answers a knock: from now on messages are signed; returns whether the connection took it."""
        nonce = new_nonce()
        self.session = Session(secret, guest_nonce, nonce, HOST)
        return self.send(wire.encode("challenge", nonce=nonce))

    def send(self, message: bytes) -> bool:
        """Sends a message, signed if this end can; returns whether the connection took it."""
        try:
            self.connection.settimeout(_SEND_S)
            self.connection.sendall(self.session.sign(message) if self.session else message)
            self.connection.setblocking(False)
        except OSError:
            return False
        return True

    def is_gone(self) -> bool:
        """Whether the other end has closed, even if that was not read yet."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def wait_for_end(self, until: float) -> None:
        """Waits until the other end has closed, or until `until` on the clock of `time.monotonic`."""
        with contextlib.suppress(OSError):
            while (left_s := until - time.monotonic()) > 0:
                self.connection.settimeout(left_s)
                if not self.connection.recv(65536):
                    return
