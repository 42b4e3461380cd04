"""The rendezvous point of Horovod's Gloo ranks: a small store of keys and values over HTTP.

Each rank of Gloo puts its address under `/<scope>/<key>`, asks for the others' again and again, and deletes its own
when all are connected. The scope `global` holds all ranks and comes first; what follows (one scope per host, per local
rank, per process set) finds all ranks at work already.

A rank that asks for another's address is answered when **all** have put theirs, not before: Horovod counts its timeout
(30 s) from then on. So a rank that takes long to start, because it loads data or the machine is busy, breaks nothing.

Horovod's client sends no credentials, but what it is told as the host of the store becomes the beginning of each URL
(`horovod.store_variables`). So every path begins with a secret, and who does not know it reads and writes nothing. What
ranks can keep in here is bounded, and so is how many connections strangers hold, and for how long.
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

# The scope of all ranks, and what Gloo writes there about hosts, which is asked for before the addresses are there.
_ALL_RANKS = "global"
_HOST_KEY = "rank_"
# A rank puts an address of 136 bytes for each of the others, in a few scopes; those of process sets come on top.
_BYTES_PER_ADDRESS = 1024
_LEAST_VALUE_BYTES = 64 * 1024
_LEAST_ROOM_BYTES = 64 * 1024**2
# What a value takes besides itself and its name.
_ENTRY_BYTES = 512
_LONGEST_NAME = 512
# A client has so long until it has asked, secret and all; and a rank for each piece of what it puts.
_PATIENCE_WITH_STRANGERS_S = 10.0
_SILENCE_S = 60.0
# So many connections that have not said the secret yet, besides two for each rank.
_MOST_STRANGERS = 64
_SECRET_BYTES = 16


class GlooStore:
    """Serves until it is closed.

    Args:
        world_size: How many ranks meet.
        host: The address to listen on; the ranks must reach it.
        patience_s: How long a rank is held up for the others before it is told that they are not there.
        secret: What every path begins with; None for a new one.
    """

    def __init__(self, world_size: int, host: str = "127.0.0.1", patience_s: float = 600.0, secret: str | None = None):
        self.secret = secrets.token_hex(_SECRET_BYTES) if secret is None else secret
        self._server = _Server((host, 0), _Handler)
        self._server.values = _Values(world_size, patience_s)
        self._server.first_part = f"{self.secret}:{self.address[1]}".encode()
        self._server.most_strangers = _MOST_STRANGERS + 2 * world_size
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="tfdistkit-gloo-store", daemon=True
        )
        self._thread.start()
        self._is_closed = False

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def close(self) -> None:
        """Lets go of those who wait, and gives the port back; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.values.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


class _NoRoomError(Exception):
    """More than the ranks of a job put."""


class _Values:
    """The values of all scopes."""

    def __init__(self, world_size: int, patience_s: float):
        self._addresses = {str(rank) for rank in range(world_size)}
        self.largest_bytes = _LEAST_VALUE_BYTES + _BYTES_PER_ADDRESS * world_size
        self._room_bytes = _LEAST_ROOM_BYTES + _BYTES_PER_ADDRESS * world_size**2
        self._patience_s = patience_s
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Keeps a value. Raises _NoRoomError."""
        with self._changed:
            values = self._scopes.setdefault(scope, {})
            room_bytes = self._room_bytes + _size(scope, key, values.get(key)) - _size(scope, key, value)
            if room_bytes < 0:
                raise _NoRoomError
            self._room_bytes = room_bytes
            values[key] = value
            self._changed.notify_all()

    def get(self, scope: str, key: str) -> bytes | None:
        """The value; None when it is not there, in the scope of all ranks only after some waiting."""
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
        there = self._scopes.get(_ALL_RANKS, {})
        return key in there if key.startswith(_HOST_KEY) else self._addresses <= there.keys()


def _size(scope: str, key: str, value: bytes | None) -> int:
    return 0 if value is None else _ENTRY_BYTES + len(scope) + len(key) + len(value)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # All ranks may come at once.
    request_queue_size = 1024
    values: _Values
    first_part: bytes
    most_strangers: int

    def __init__(self, *args: Any):
        super().__init__(*args)
        # Those that have not said the secret, the oldest first, and since when.
        self._strangers: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a client in a thread of its own. When there are too many strangers, the one that came first goes."""
        with self._lock:
            if len(self._strangers) >= self.most_strangers:
                self._turn_away(next(iter(self._strangers)))
            self._strangers[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Is called again and again."""
        long_ago = time.monotonic() - _PATIENCE_WITH_STRANGERS_S
        with self._lock:
            for stranger in [one for one, since in self._strangers.items() if since < long_ago]:
                self._turn_away(stranger)

    def forget(self, request: Any) -> None:
        """Knows a client to be a rank, or gone."""
        with self._lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.forget(request)
        super().shutdown_request(request)

    def _turn_away(self, stranger: socket.socket) -> None:
        """Its thread reads the end of what it sends, and leaves."""
        self._strangers.pop(stranger)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A rank that was killed in the middle of a request is told of elsewhere."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENCE_S

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
            if len(value) == int(length):  # else the rank went away
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
        """Says nothing: each rank asks hundreds of times."""

    def _place(self) -> tuple[str, str] | None:
        """Scope and key; None for a stranger, or a path that no rank asks for: that is answered."""
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
