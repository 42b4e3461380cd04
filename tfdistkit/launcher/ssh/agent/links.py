"""Measure the network between two hosts: one serves, the other one measures.

Runs on the hosts, in their agents: imports only the standard library.
"""

from __future__ import annotations

import contextlib
import socket
import time

# Round trips of one byte, for the latency; the first ones warm up.
_ROUNDS = 60
_WARM_UP = 10
# Duration of the bandwidth measurement.
_SENDING_S = 0.5
_CHUNK_BYTES = 256 * 1024
# Less than the timeout for silent hosts: an agent that waits here answers no pings.
_TIMEOUT_S = 6.0
# A client that sends for longer is not one of the job's hosts.
_LONGEST_S = 10.0


class LinkServer:
    """The serving end of a measurement, for one client at a time."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def open(self, address: str) -> int:
        """Listens on an address of this host; returns the port."""
        self._listener = socket.create_server((address, 0), family=_family(address))
        self._listener.settimeout(_TIMEOUT_S)
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self) -> int:
        """Serves one client until it ends; sends it the number of bytes received, and returns that number."""
        assert self._listener is not None
        with contextlib.closing(self._listener), self._listener.accept()[0] as client:
            client.settimeout(_TIMEOUT_S)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(_ROUNDS):
                client.sendall(client.recv(1))
            count, deadline = 0, time.monotonic() + _LONGEST_S
            buffer = bytearray(_CHUNK_BYTES)
            while received := client.recv_into(buffer):
                count += received
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the peer did not stop sending within {_LONGEST_S:g} s")
            client.sendall(b"%d\n" % count)
        return count


def measure_link(address: str, port: int) -> dict[str, float]:
    """Measures the latency (`round_trip_s`) and the bandwidth (`bytes_per_s`) to another host.

    Args:
        address: The address of the other host.
        port: Its port.
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
        connection.recv(64)  # arrives after the peer has received all bytes
        seconds = time.perf_counter() - started
    return {"round_trip_s": sorted(times[_WARM_UP:])[len(times[_WARM_UP:]) // 2], "bytes_per_s": sent / seconds}


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
