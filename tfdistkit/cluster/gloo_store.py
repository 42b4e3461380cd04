"""The meeting point of Horovod's Gloo ranks: a small store of keys and values over HTTP.

Each rank of Gloo puts its address under `/<scope>/<key>`, asks for the others' again and again, and deletes its own
when all are connected. The scope `global` holds all ranks and comes first; what follows (one scope per host, per local
rank, per process set) finds all ranks at work already.

A rank that asks for another's address is answered when **all** have put theirs, not before: Horovod counts its timeout
(30 s) from then on. So a rank that takes long to start, because it loads data or the machine is busy, breaks nothing.
"""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# The scope of all ranks, and what Gloo writes there about hosts, which is asked for before the addresses are there.
_ALL_RANKS = "global"
_HOST_KEY = "rank_"
# Far more than the addresses of a large job.
_LARGEST_VALUE_BYTES = 16 * 1024 * 1024
# A client that connects and says nothing is dropped.
_SILENCE_S = 60.0


class GlooStore:
    """Serves until it is closed.

    Args:
        world_size: How many ranks meet.
        host: The address to listen on; the ranks must reach it.
        patience_s: How long a rank is held up for the others before it is told that they are not there.
    """

    def __init__(self, world_size: int, host: str = "127.0.0.1", patience_s: float = 600.0):
        self._server = _Server((host, 0), _Handler)
        self._server.values = _Values(world_size, patience_s)
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


class _Values:
    """The values of all scopes."""

    def __init__(self, world_size: int, patience_s: float):
        self._addresses = {str(rank) for rank in range(world_size)}
        self._patience_s = patience_s
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, scope: str, key: str, value: bytes) -> None:
        with self._changed:
            self._scopes.setdefault(scope, {})[key] = value
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
            self._scopes.get(scope, {}).pop(key, None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_ready(self, key: str) -> bool:
        there = self._scopes.get(_ALL_RANKS, {})
        return key in there if key.startswith(_HOST_KEY) else self._addresses <= there.keys()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # All ranks may come at once.
    request_queue_size = 1024
    values: _Values

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A rank that was killed in the middle of a request is told of elsewhere."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SILENCE_S

    def do_GET(self) -> None:
        place = self._place()
        value = None if place is None else self.server.values.get(*place)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        place, length = self._place(), self.headers.get("Content-Length", "")
        if place is None or not length.isdecimal() or int(length) > _LARGEST_VALUE_BYTES:
            self._answer(400)
            return
        value = self.rfile.read(int(length))
        if len(value) < int(length):  # the rank went away
            return
        self.server.values.put(*place, value)
        self._answer(200)

    def do_DELETE(self) -> None:
        place = self._place()
        if place is not None:
            self.server.values.delete(*place)
        self._answer(400 if place is None else 200)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: each rank asks hundreds of times."""

    def _place(self) -> tuple[str, str] | None:
        parts = self.path.split("/")
        return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "" and parts[2] else None

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
