"""Checks whether tasks of the cluster are alive, by an HTTP/2 PING to their gRPC ports.

A stopped process (SIGSTOP) still accepts connections, because the kernel does. An HTTP/2 PING (RFC 9113, 6.7) is
answered by gRPC's own threads, only while the process runs.
"""

from __future__ import annotations

import enum
import socket
import threading
import time
from collections.abc import Iterable, Mapping

from tfdistkit.cluster.addresses import split_address

# The client's preface and an empty SETTINGS frame (RFC 9113, 3.4), then a PING frame with 8 bytes to echo.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PING = bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + b"tfdistkt"
_PONG = bytes((0, 0, 8, 6, 1, 0, 0, 0, 0)) + b"tfdistkt"
# Most bytes that a gRPC server sends before the answer; a peer that sends more is no gRPC server.
_MOST_BYTES = 65_536
# Seconds between two checks of a task.
_EVERY_S = 1.0


class Sign(enum.Enum):
    """Describes the state of a task as its address showed it."""

    ALIVE = "answers"
    GONE = "nothing listens there"
    SILENT = "accepts connections but does not answer, or is unreachable"


def look(address: str, timeout_s: float) -> Sign:
    """Checks once whether a task is alive.

    Args:
        address: The task's `host:port`.
        timeout_s: Seconds to wait for the answer.

    Returns:
        The state. A host name that does not resolve (yet) counts as `GONE`.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection(split_address(address), timeout_s) as connection:
            connection.sendall(_HELLO + _PING)
            heard = b""
            while _PONG not in heard:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                more = connection.recv(4096)
                if not more or len(heard) > _MOST_BYTES:
                    return Sign.GONE  # Something listens, but it is no gRPC server (any more).
                if time.monotonic() > deadline:
                    return Sign.SILENT
                heard += more
            return Sign.ALIVE
    except TimeoutError:
        return Sign.SILENT
    except (ConnectionError, socket.gaierror):
        return Sign.GONE
    except OSError:  # No route to the host, network down.
        return Sign.SILENT


def wait_for(addresses: Mapping[str, str], timeout_s: float) -> dict[str, Sign]:
    """Waits until all tasks are alive, or the timeout passes.

    Args:
        addresses: Name -> `host:port`.
        timeout_s: Seconds to wait in total.

    Returns:
        The tasks that did not answer, with the last state of each; empty if all are alive.
    """
    deadline = time.monotonic() + timeout_s
    missing = dict.fromkeys(addresses, Sign.GONE)
    while missing:
        for name in list(missing):
            left = deadline - time.monotonic()
            missing[name] = look(addresses[name], max(0.05, min(1.0, left)))
            if missing[name] is Sign.ALIVE:
                del missing[name]
        if time.monotonic() >= deadline:
            break
        if missing:
            time.sleep(0.1)
    return missing


class Watch:
    """Monitors tasks in background threads until the process exits.

    Args:
        addresses: Name -> `host:port`.
    """

    def __init__(self, addresses: Mapping[str, str]):
        self._addresses = dict(addresses)
        now = time.monotonic()
        self._alive_at = dict.fromkeys(addresses, now)
        self._signs = dict.fromkeys(addresses, Sign.ALIVE)
        self._stopped = threading.Event()
        for name in addresses:  # One thread each: a silent task must not delay the check of another.
            threading.Thread(target=self._monitor, args=(name,), name=f"watch {name}", daemon=True).start()

    def _monitor(self, name: str) -> None:
        while not self._stopped.wait(_EVERY_S):
            sign = look(self._addresses[name], 2 * _EVERY_S)
            if sign is Sign.ALIVE:
                self._alive_at[name] = time.monotonic()
            self._signs[name] = sign

    def missing_for(self, name: str) -> float:
        """Returns the seconds since a task last answered; 0 while it does."""
        return 0.0 if self._signs[name] is Sign.ALIVE else time.monotonic() - self._alive_at[name]

    def sign(self, name: str) -> Sign:
        """Returns the last state of a task."""
        return self._signs[name]

    def missing(self, names: Iterable[str], seconds: float) -> list[str]:
        """Returns the tasks among `names` that have not answered for at least `seconds`."""
        return [name for name in names if self.missing_for(name) >= seconds]

    def stop(self) -> None:
        """Stops the monitoring."""
        self._stopped.set()
