"""Gathers a few bytes between the ranks of one host, in a tenth of the time of TensorFlow's smallest collective.

Rank 0 listens on a Unix socket and its peers connect, so no port is opened. If a peer is late, the ranks abort the
round and use a collective, in which TensorFlow detects ranks that run different steps. A two-phase commit in each round
makes all ranks take the same decision: rank 0 sends the bytes of all ranks (PREPARE), each rank votes (COMMIT or
ABORT), rank 0 sends the decision.
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

# Timeout in seconds for peers to join a round. In a job in step they join within a millisecond.
_JOIN_S = 0.1
# Timeout in seconds of rank 0 for a vote: only a stopped process takes longer.
_VOTE_S = 5.0
# Timeout in seconds of the others for the decision: longer, because a rank that gives up does not know it.
_DECISION_S = 60.0
# Timeout in seconds to connect: all ranks have started by then.
_CONNECT_S = 5.0

# Largest row of a rank in bytes. Larger rows take a collective: they would not fit into the socket's buffer.
MOST_BYTES = 8192

TOKEN_BYTES = 24
_NAME_BYTES = 8

# Largest message in bytes: enough for the rows of some thousand ranks.
_LONGEST = 1 << 24

_HEADER = struct.Struct("!BQI")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_ROW, _PREPARE, _COMMIT, _ABORT = range(4)


def host_id() -> int:
    """Returns an id that is equal for processes that can reach each other by Unix sockets; 0 if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        own = f"{boot} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return 0  # Not Linux.
    return int.from_bytes(blake2b(own.encode(), digest_size=7).digest(), "little")


class Listener:
    """Listens on rank 0's Unix socket for its peers.

    Attributes:
        token: The name of the socket and the proof of belonging to the job, for the peers.
    """

    def __init__(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_address(self.token))
        self._socket.listen(64)

    def accept(self, size: int) -> LocalExchange:
        """Accepts the connections of all peers, and closes the socket.

        Args:
            size: The number of ranks, rank 0 included.

        Raises:
            OSError: if a peer did not connect in time.
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
        """Closes the socket without accepting peers."""
        self._socket.close()

    def _rank_of(self, peer: _Connection) -> int | None:
        """Returns the rank of a connection; None if it does not belong to the job."""
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
        token: `Listener.token` of rank 0.
        rank: The rank of this process.

    Raises:
        OSError: if the connection fails.
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
    """Holds the connections of one rank: rank 0 to all its peers, every other rank to rank 0."""

    def __init__(self, rank: int, peers: list[_Connection]):
        self._rank, self._peers = rank, peers
        self._round = 0

    def gather(self, row: bytes) -> list[bytes] | None:
        """Returns the bytes of all ranks in rank order; None, on all ranks, if they must use a collective.

        Args:
            row: The bytes of this rank, at most `MOST_BYTES`.
        """
        if not self._peers:
            return None
        self._round += 1
        try:
            rows = self._lead(row) if self._rank == 0 else self._follow(row)
        except OSError:
            # A peer is gone. The collective names it; the other ranks lose this connection and enter it too.
            self.close()
            return None
        return rows

    def close(self) -> None:
        """Closes the connections; from now on all ranks use collectives."""
        for peer in self._peers:
            peer.close()
        self._peers = []

    def _lead(self, row: bytes) -> list[bytes] | None:
        deadline = time.monotonic() + _JOIN_S
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
        prepared = host.receive_of(self._round, time.monotonic() + _JOIN_S)
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
        rows = prepared[1]
        return [rows[start : start + len(row)] for start in range(0, len(rows), len(row))]

    def _send_all(self, kind: int, data: bytes = b"") -> None:
        for peer in self._peers:
            peer.send(kind, self._round, data)


class _Connection:
    def __init__(self, one: socket.socket):
        self._socket, self._buffer = one, b""

    def user(self) -> int:
        """Returns the user id of the peer."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[1])

    def send(self, kind: int, number: int, data: bytes = b"") -> None:
        self._socket.settimeout(_VOTE_S)
        self._socket.sendall(_HEADER.pack(kind, number, len(data)) + data)

    def receive_of(self, number: int, deadline: float) -> tuple[int, bytes] | None:
        """Returns the next message of a round, skipping earlier rounds; None if the deadline passes."""
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
    """Returns a name in Linux's abstract namespace: it has no file, and disappears with the process."""
    return b"\0tfdistkit-" + token[:_NAME_BYTES].hex().encode()
