"""Exchanges a few bytes between the ranks of one host, in a tenth of the time of TensorFlow's smallest collective.

Rank 0 listens on a Unix socket, the others connect: no port is opened. Not every exchange takes place: a rank that
waits alone for a moment gives up, and then all ranks have to use a collective, in which TensorFlow finds ranks that
run different steps. That all ranks decide alike is settled by a two-phase commit in each round: rank 0 sends
everybody's bytes (PREPARE), each rank votes (COMMIT or ABORT), rank 0 sends the decision.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from hashlib import blake2b
from pathlib import Path

# Seconds that a rank waits for its peers to come. Those of a job in step are there within a millisecond.
_PATIENCE_S = 0.1
# Seconds that rank 0 waits for a vote: only a peer that was stopped takes longer.
_VOTE_S = 5.0
# Seconds that the others wait for the decision. Who gives up does not know it, so this is for a rank 0 that was stopped.
_DECISION_S = 60.0
# Seconds to connect in: everybody is there.
_CONNECT_S = 5.0

# More bytes than this from each rank are for a collective: they would not fit into the socket's buffer.
MOST_BYTES = 8192

TOKEN_BYTES = 24
_NAME_BYTES = 8

# No message is longer, that of rank 0 for some thousand ranks included.
_LONGEST = 1 << 24

_HEADER = struct.Struct("!BQI")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_ROW, _PREPARE, _COMMIT, _ABORT = range(4)


def host_id() -> int:
    """Returns a number that processes have in common if a Unix socket of one can be reached by the other; 0 if none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        own = f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return 0  # Not Linux.
    return int.from_bytes(blake2b(own.encode(), digest_size=7).digest(), "little")


class Listener:
    """Rank 0's socket, to which the others connect.

    Attributes:
        token: What they need to know: where the socket is, and the proof that they belong to the job.
    """

    def __init__(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_address(self.token))
        self._socket.listen(64)

    def accept(self, size: int) -> LocalExchange:
        """Waits for the others, and closes the socket.

        Args:
            size: How many ranks there are, rank 0 included.

        Raises:
            OSError: if one of them did not come.
        """
        deadline = time.monotonic() + _CONNECT_S
        peers: dict[int, _Connection] = {}
        try:
            with self._socket:
                while len(peers) < size - 1:
                    self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                    peer = _Connection(self._socket.accept()[0])
                    rank = self._rank_of(peer)
                    if rank is None:
                        peer.close()
                    else:
                        peers[rank] = peer
        except OSError:
            for peer in peers.values():
                peer.close()
            raise
        return LocalExchange(0, [peers[rank] for rank in sorted(peers)])

    def close(self) -> None:
        """Closes the socket, to which nobody is to connect."""
        self._socket.close()

    def _rank_of(self, peer: _Connection) -> int | None:
        """Returns which rank has connected; None for a stranger."""
        if peer.user() != os.getuid():
            return None
        try:
            message = peer.receive(time.monotonic() + 1)
        except OSError:
            return None
        is_ours = message is not None and hmac.compare_digest(message[2], self.token)
        return message[1] if message is not None and is_ours else None


def connect(token: bytes, rank: int) -> LocalExchange:
    """Connects to rank 0's socket.

    Args:
        token: What `Listener.token` is on rank 0.
        rank: This process's.

    Raises:
        OSError: if it cannot be reached.
    """
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.settimeout(_CONNECT_S)
    try:
        one.connect(_address(token))
        host = _Connection(one)
        host.send(_ROW, rank, token)
    except OSError:
        one.close()
        raise
    return LocalExchange(rank, [host])


class LocalExchange:
    """The connections of one rank: those to all others on rank 0, that to rank 0 elsewhere."""

    def __init__(self, rank: int, peers: list[_Connection]):
        self._rank, self._peers = rank, peers
        self._round = 0

    def gather(self, row: bytes) -> list[bytes] | None:
        """Returns the bytes of all ranks in their order; None, on all ranks, if they have to use a collective.

        Args:
            row: This rank's, at most `MOST_BYTES`.
        """
        if not self._peers:
            return None
        self._round += 1
        try:
            rows = self._lead(row) if self._rank == 0 else self._follow(row)
        except OSError:
            # A peer is gone. The collective names it, and the others come there too, as they lose this connection.
            self.close()
            return None
        return rows

    def close(self) -> None:
        """Closes the connections: from now on, and on all ranks, collectives are used."""
        for peer in self._peers:
            peer.close()
        self._peers = []

    def _lead(self, row: bytes) -> list[bytes] | None:
        deadline = time.monotonic() + _PATIENCE_S
        rows = [row]
        for peer in self._peers:
            message = peer.receive_of(self._round, deadline)
            if message is None or message[0] != _ROW or len(message[1]) != len(row):
                self._send_all(_ABORT)
                return None
            rows.append(message[1])
        self._send_all(_PREPARE, b"".join(rows))
        deadline = time.monotonic() + _VOTE_S
        votes = [peer.receive_of(self._round, deadline) for peer in self._peers]
        if None in votes:
            raise OSError("no vote")
        is_agreed = all(vote is not None and vote[0] == _COMMIT for vote in votes)
        self._send_all(_COMMIT if is_agreed else _ABORT)
        return rows if is_agreed else None

    def _follow(self, row: bytes) -> list[bytes] | None:
        host = self._peers[0]
        host.send(_ROW, self._round, row)
        prepared = host.receive_of(self._round, time.monotonic() + _PATIENCE_S)
        if prepared is None:
            host.send(_ABORT, self._round)
            return None
        if prepared[0] != _PREPARE:
            return None
        host.send(_COMMIT, self._round)
        decision = host.receive_of(self._round, time.monotonic() + _DECISION_S)
        if decision is None:
            raise OSError("no decision")
        if decision[0] != _COMMIT:
            return None
        every = prepared[1]
        return [every[start : start + len(row)] for start in range(0, len(every), len(row))]

    def _send_all(self, kind: int, data: bytes = b"") -> None:
        for peer in self._peers:
            peer.send(kind, self._round, data)


class _Connection:
    def __init__(self, one: socket.socket):
        self._socket, self._buffer = one, b""

    def user(self) -> int:
        """Returns the number of the user at the other end."""
        told = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(told)[1])

    def send(self, kind: int, number: int, data: bytes = b"") -> None:
        self._socket.settimeout(_VOTE_S)
        self._socket.sendall(_HEADER.pack(kind, number, len(data)) + data)

    def receive_of(self, number: int, deadline: float) -> tuple[int, bytes] | None:
        """Returns the next message of a round, past those of earlier ones; None if the deadline passes."""
        while (message := self.receive(deadline)) is not None:
            kind, of, data = message
            if of == number:
                return kind, data
            if of > number:
                raise OSError(f"a message of round {of} in round {number}")
        return None

    def receive(self, deadline: float) -> tuple[int, int, bytes] | None:
        while True:
            if len(self._buffer) >= _HEADER.size:
                kind, number, length = _HEADER.unpack_from(self._buffer)
                if length > _LONGEST:
                    raise OSError(f"a message of {length} bytes")
                end = _HEADER.size + length
                if len(self._buffer) >= end:
                    data, self._buffer = self._buffer[_HEADER.size : end], self._buffer[end:]
                    return kind, number, data
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._socket.settimeout(left)
            try:
                read = self._socket.recv(1 << 16)
            except TimeoutError:
                return None
            if not read:
                raise OSError("the peer has closed the connection")
            self._buffer += read

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _address(token: bytes) -> bytes:
    """In Linux's abstract namespace: no file, and gone with the process."""
    return b"\0tfdistkit-" + token[:_NAME_BYTES].hex().encode()
