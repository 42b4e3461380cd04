"""How fast two hosts talk to each other: one serves, the other one measures.

Runs on the hosts, in their agents: the standard library only.
"""

from __future__ import annotations

import contextlib
import socket
import time

# Small messages to and fro, for the latency; the first ones find the way.
_ROUNDS = 60
_WARM_UP = 10
# Then as much as fits into this time.
_SENDING_S = 0.5
_CHUNK_BYTES = 256 * 1024
# Less than what a host may be silent for: an agent that waits here answers nobody else.
_TIMEOUT_S = 6.0
# A visitor that goes on and on is no host of ours.
_LONGEST_S = 10.0


class LinkServer:
    """The serving end, for one visitor at a time."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def open(self, address: str) -> int:
        """Listens on an address of this host; returns the port."""
        self._listener = socket.create_server((address, 0), family=_family(address))
        self._listener.settimeout(_TIMEOUT_S)
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> int:
        """Answers one visitor until it ends, and tells it how many bytes came; returns the same."""
        assert self._listener is not None
        with contextlib.closing(self._listener), self._listener.accept()[0] as visitor:
            visitor.settimeout(_TIMEOUT_S)
            visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_ROUNDS):
                visitor.sendall(visitor.recv(1))
            count, deadline = 0, time.monotonic() + _LONGEST_S
            buffer = bytearray(_CHUNK_BYTES)
            while received := visitor.recv_into(buffer):
                count += received
                if time.monotonic() > deadline:
                    raise TimeoutError("whoever came to measure the link did not end")
            visitor.sendall(b"%d\n" % count)
        return count


def measure_link(address: str, port: int) -> dict[str, float]:
    """Returns the time of a message to another host and back (`round_trip_s`), and `bytes_per_s` to it.

    Args:
        address: Of the other host.
        port: Where it serves.
    """
    with socket.create_connection((address, port), _TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - started)
        chunk = bytes(_CHUNK_BYTES)
        started = time.perf_counter()
        sent = 0
        while time.perf_counter() - started < _SENDING_S:
            connection.sendall(chunk)
            sent += len(chunk)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(64)  # when this comes, all has come
        seconds = time.perf_counter() - started
    return {"round_trip_s": sorted(times[_WARM_UP:])[len(times[_WARM_UP:]) // 2], "bytes_per_s": sent / seconds}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
