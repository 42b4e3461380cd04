"""The store in which Gloo ranks meet, asked as Gloo asks it: over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdistkit.cluster.gloo_store import GlooStore

DEADLINE_S = 20


@pytest.fixture
def store() -> Iterator[GlooStore]:
    with contextlib.closing(GlooStore(2)) as made:
        yield made


def ask(store: GlooStore, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*store.address, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_keeps_any_bytes(store: GlooStore) -> None:
    value = bytes(range(256)) * 500
    assert ask(store, "GET", "/local_here/0") == (404, b"")
    assert ask(store, "PUT", "/local_here/0", value) == (200, b"")
    assert ask(store, "GET", "/local_here/0") == (200, value)
    assert ask(store, "GET", "/cross_0/0") == (404, b"")
    assert ask(store, "DELETE", "/local_here/0")[0] == 200
    assert ask(store, "GET", "/local_here/0")[0] == 404
    assert ask(store, "DELETE", "/local_here/0")[0] == 200


def test_addresses_are_told_when_all_are_there(store: GlooStore) -> None:
    ask(store, "PUT", "/global/0", b"mine")
    with ThreadPoolExecutor(2) as pool:
        own, other = pool.submit(ask, store, "GET", "/global/0"), pool.submit(ask, store, "GET", "/global/1")
        time.sleep(0.3)
        assert not own.done() and not other.done()
        ask(store, "PUT", "/global/1", b"yours")
        assert own.result(DEADLINE_S) == (200, b"mine")
        assert other.result(DEADLINE_S) == (200, b"yours")


def test_the_names_of_hosts_are_told_before_addresses(store: GlooStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        name = pool.submit(ask, store, "GET", "/global/rank_0")
        time.sleep(0.1)
        assert not name.done()
        ask(store, "PUT", "/global/rank_0", b"host")
        assert name.result(DEADLINE_S) == (200, b"host")


def test_ranks_meet_again(store: GlooStore) -> None:
    for addresses in ((b"a", b"b"), (b"c", b"d")):
        for rank, address in enumerate(addresses):
            ask(store, "PUT", f"/global/{rank}", address)
        assert ask(store, "GET", "/global/1") == (200, addresses[1])
        for rank in (0, 1):
            ask(store, "DELETE", f"/global/{rank}")


def test_patience_ends() -> None:
    with contextlib.closing(GlooStore(2, patience_s=0.2)) as store:
        ask(store, "PUT", "/global/0", b"mine")
        assert ask(store, "GET", "/global/1") == (404, b"")


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/global"), ("PUT", "/a/b/c"), ("DELETE", "/"), ("GET", "/"), ("GET", "/a/")]
)
def test_other_paths_are_refused(store: GlooStore, method: str, path: str) -> None:
    assert ask(store, method, path, b"x")[0] in (400, 404)


def test_a_huge_or_nameless_length_is_refused(store: GlooStore) -> None:
    for length in ("99999999999999", "-1", "many"):
        with socket.create_connection(store.address, timeout=DEADLINE_S) as stranger:
            stranger.sendall(f"PUT /global/0 HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
            assert b" 400 " in stranger.recv(1000)


def test_a_rank_that_dies_while_it_speaks_leaves_nothing(store: GlooStore) -> None:
    with socket.create_connection(store.address, timeout=DEADLINE_S) as dying:
        dying.sendall(b"PUT /local_x/0 HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf")
    time.sleep(0.2)
    assert ask(store, "GET", "/local_x/0")[0] == 404


def test_closing_lets_go_of_those_who_wait_and_of_the_port() -> None:
    store = GlooStore(2)
    address = store.address
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, store, "GET", "/global/1")
        time.sleep(0.2)
        store.close()
        assert waiting.result(DEADLINE_S)[0] == 404
    store.close()
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=1)
    assert not [thread for thread in threading.enumerate() if thread.name == "tfdistkit-gloo-store"]
