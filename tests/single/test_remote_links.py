"""The measurement of a network link, on loopback; and clients that are not hosts of the job."""

from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdistkit.launcher.ssh.agent import links
from tfdistkit.launcher.ssh.agent.links import LinkServer, measure_link

DEADLINE_S = 30


def test_both_ends_count_the_same_bytes() -> None:
    server = LinkServer()
    port = server.open("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(server.serve)
        measured = measure_link("127.0.0.1", port)
        assert served.result(DEADLINE_S) > 0
    assert 0 < measured["round_trip_s"] < 1 and measured["bytes_per_s"] > 1e6


def test_a_client_that_never_stops_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_LONGEST_S", 0.3)
    server = LinkServer()
    address = ("127.0.0.1", server.open("127.0.0.1"))
    with ThreadPoolExecutor(1) as pool, socket.create_connection(address, DEADLINE_S) as stranger:
        served = pool.submit(server.serve)
        stranger.sendall(bytes(links._ROUNDS))
        with contextlib.suppress(OSError):
            while not served.done():
                stranger.sendall(bytes(65_536))
        with pytest.raises(TimeoutError, match="did not stop sending"):
            served.result(DEADLINE_S)
