"""Serves the rendezvous of Horovod's Gloo ranks: a small key-value store over HTTP.

Each rank of Gloo puts its address under `/<scope>/<key>`, polls for the addresses of its peers, and deletes its own
once all are connected. The scope `global`, with all ranks, comes first; in later scopes (one per host, per local rank,
per process set) all ranks are running already.

The store answers a request for an address once **all** ranks have put theirs: Horovod's timeout (30 s) starts then. So
a rank may start late, because it loads data or the machine is busy.

Horovod's client sends no credentials, but copies the host of the store into each URL (`horovod.store_variables`). So
every path begins with a secret, without which nothing is read or written. The bytes in the store are bounded, and so
are the number and the duration of connections without the secret.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The scope of all ranks, and the prefix of Gloo's keys about hosts, which are read before all addresses are put.
_ALL_RANKS = "global"
_HOST_KEY = "rank_"
# A rank puts an address of 136 bytes for each peer in a few scopes, and in those of process sets.
_BYTES_PER_ADDRESS = 1024
_LEAST_VALUE_BYTES = 64 * 1024
_LEAST_ROOM_BYTES = 64 * 1024**2
# Overhead of a value, besides its bytes and its name.
_ENTRY_BYTES = 512
_LONGEST_NAME = 512
# Timeouts in seconds for a client to send the secret, and for a rank to send each part of a value.
_SECRET_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
# Most connections that have not sent the secret, besides two for each rank.
_MOST_UNIDENTIFIED = 64
_SECRET_BYTES = 16


class GlooStore:
    """Serves the store from a thread until `close`.

    Args:
        world_size: The number of ranks.
        host: The address to listen on; the ranks must reach it.
        patience_s: The seconds that a request waits for the addresses of all ranks, before the answer 404.
        secret: The prefix of every path; None for a new one.
    """

    def __init__(self, world_size: int, host: str = "127.0.0.1", patience_s: float = 600.0, secret: str | None = None):
        self.secret = secrets.token_hex(_SECRET_BYTES) if secret is None else secret
        self._server = _Server((host, 0), _Handler)
        self._server.values = _Values(world_size, patience_s)
        self._server.first_part = f"{self.secret}:{self.address[1]}".encode()
        self._server.most_unidentified = _MOST_UNIDENTIFIED + 2 * world_size
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="tfdistkit-gloo-store", daemon=True
        )
        self._thread.start()
        self._is_closed = False

    @property
    def address(self) -> tuple[str, int]:
        """Returns the host and the port of the server."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Answers waiting requests, and releases the port; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.values.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _NoRoomError(Exception):
    """The store is full: the ranks of a job put less."""


class _Values:
    """Holds the values of all scopes."""

    def __init__(self, world_size: int, patience_s: float):
        self._addresses = {str(rank) for rank in range(world_size)}
        self.largest_bytes = _LEAST_VALUE_BYTES + _BYTES_PER_ADDRESS * world_size
        self._room_bytes = _LEAST_ROOM_BYTES + _BYTES_PER_ADDRESS * world_size**2
        self._patience_s = patience_s
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Stores a value. Raises _NoRoomError."""
        with self._changed:
            values = self._scopes.setdefault(scope, {})
            room_bytes = self._room_bytes + _size(scope, key, values.get(key)) - _size(scope, key, value)
            if room_bytes < 0:
                raise _NoRoomError
            self._room_bytes = room_bytes
            values[key] = value
            self._changed.notify_all()

    def get(self, scope: str, key: str) -> bytes | None:
        """Returns a value, or None; in the scope of all ranks, waits until all addresses are put."""
        deadline = time.monotonic() + self._patience_s
        with self._changed:
            while scope == _ALL_RANKS and not self._is_ready(key) and not self._is_closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._scopes.get(scope, {}).get(key)

    def delete(self, scope: str, key: str) -> None:
        with self._changed:
            values = self._scopes.get(scope, {})
            self._room_bytes += _size(scope, key, values.pop(key, None))
            if not values:
                self._scopes.pop(scope, None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_ready(self, key: str) -> bool:
        values = self._scopes.get(_ALL_RANKS, {})
        return key in values if key.startswith(_HOST_KEY) else self._addresses <= values.keys()


def _size(scope: str, key: str, value: bytes | None) -> int:
    return 0 if value is None else _ENTRY_BYTES + len(scope) + len(key) + len(value)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # All ranks may connect at once.
    request_queue_size = 1024
    values: _Values
    first_part: bytes
    most_unidentified: int

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Connections that have not sent the secret -> when they were opened, the oldest first.
        self._unidentified: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a client in its own thread; disconnects the oldest unidentified one if there are too many."""
        with self._lock:
            if len(self._unidentified) >= self.most_unidentified:
                self._disconnect(next(iter(self._unidentified)))
            self._unidentified[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Disconnects clients that have not sent the secret in time; `serve_forever` calls it at each poll."""
        oldest = time.monotonic() - _SECRET_TIMEOUT_S
        with self._lock:
            for client in [one for one, since in self._unidentified.items() if since < oldest]:
                self._disconnect(client)

    def forget(self, request: Any) -> None:
        """Removes a client from the unidentified ones: it is a rank, or has closed."""
        with self._lock:
            self._unidentified.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.forget(request)
        super().shutdown_request(request)

    def _disconnect(self, client: socket.socket) -> None:
        """Shuts a connection down, so that its thread reads the end and returns."""
        self._unidentified.pop(client)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors: the launcher reports a rank that was killed during a request."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _READ_TIMEOUT_S

    def do_GET(self) -> None:
        place = self._place()
        if place is not None:
            value = self.server.values.get(*place)
            self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        place = self._place()
        if place is None:
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 10):
            self._answer(400)
        elif int(length) > self.server.values.largest_bytes:
            self._answer(413)
        else:
            value = self.rfile.read(int(length))
            if len(value) == int(length):  # otherwise the rank has closed
                self._keep(place, value)

    def do_DELETE(self) -> None:
        place = self._place()
        if place is not None:
            self.server.values.delete(*place)
            self._answer(200)

    def _keep(self, place: tuple[str, str], value: bytes) -> None:
        try:
            self.server.values.put(*place, value)
        except _NoRoomError:
            self._answer(507)
        else:
            self._answer(200)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: each rank sends hundreds of requests."""

    def _place(self) -> tuple[str, str] | None:
        """Returns scope and key; answers an invalid request or one without the secret itself, and returns None."""
        parts = self.path.split("/", 4)
        if len(parts) < 2 or parts[0] or not hmac.compare_digest(parts[1].encode(), self.server.first_part):
            self._answer(403)
            return None
        self.server.forget(self.connection)
        if len(parts) != 4 or not parts[3] or len(self.path) > _LONGEST_NAME:
            self._answer(400)
            return None
        return parts[2], parts[3]

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
