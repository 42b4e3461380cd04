"""The store for the rendezvous of Gloo ranks, with Gloo's requests over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest

from tfdistkit.cluster.environments.horovod import store_variables
from tfdistkit.cluster.rendezvous import gloo_store
from tfdistkit.cluster.rendezvous.gloo_store import GlooStore

DEADLINE_S = 20


@pytest.fixture
def store() -> Iterator[GlooStore]:
    with contextlib.closing(GlooStore(2)) as made:
        yield made


def ask(store: GlooStore, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Composes a URL as Horovod's client does."""
    told = store_variables(*store.address, store.secret)
    url = f"http://{told['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{told['HOROVOD_GLOO_RENDEZVOUS_PORT']}{path}"
    return ask_as_stranger(store, method, urlsplit(url).path, body)


def ask_as_stranger(store: GlooStore, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*store.address, timeout=DEADLINE_S)
    with contextlib.closing(connection):
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def path_of(store: GlooStore, path: str = "/global/0") -> str:
    return f"/{store.secret}:{store.address[1]}{path}"


def test_stores_any_bytes(store: GlooStore) -> None:
    value = bytes(range(256)) * 250
    assert ask(store, "GET", "/local_here/0") == (404, b"")
    assert ask(store, "PUT", "/local_here/0", value) == (200, b"")
    assert ask(store, "GET", "/local_here/0") == (200, value)
    assert ask(store, "GET", "/cross_0/0") == (404, b"")
    assert ask(store, "DELETE", "/local_here/0")[0] == 200
    assert ask(store, "GET", "/local_here/0")[0] == 404
    assert ask(store, "DELETE", "/local_here/0")[0] == 200


def test_addresses_are_served_once_all_are_put(store: GlooStore) -> None:
    ask(store, "PUT", "/global/0", b"mine")
    with ThreadPoolExecutor(2) as pool:
        own, other = pool.submit(ask, store, "GET", "/global/0"), pool.submit(ask, store, "GET", "/global/1")
        time.sleep(0.3)
        assert not own.done() and not other.done()
        ask(store, "PUT", "/global/1", b"yours")
        assert own.result(DEADLINE_S) == (200, b"mine")
        assert other.result(DEADLINE_S) == (200, b"yours")


def test_host_names_are_served_before_addresses(store: GlooStore) -> None:
    with ThreadPoolExecutor(1) as pool:
        name = pool.submit(ask, store, "GET", "/global/rank_0")
        time.sleep(0.1)
        assert not name.done()
        ask(store, "PUT", "/global/rank_0", b"host")
        assert name.result(DEADLINE_S) == (200, b"host")


def test_a_second_rendezvous(store: GlooStore) -> None:
    for addresses in ((b"a", b"b"), (b"c", b"d")):
        for rank, address in enumerate(addresses):
            ask(store, "PUT", f"/global/{rank}", address)
        assert ask(store, "GET", "/global/1") == (200, addresses[1])
        for rank in (0, 1):
            ask(store, "DELETE", f"/global/{rank}")


def test_waiting_requests_time_out() -> None:
    with contextlib.closing(GlooStore(2, patience_s=0.2)) as store:
        ask(store, "PUT", "/global/0", b"mine")
        assert ask(store, "GET", "/global/1") == (404, b"")


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/global"), ("PUT", "/a/b/c"), ("DELETE", "/"), ("GET", "/"), ("GET", "/a/")]
)
def test_other_paths_are_refused(store: GlooStore, method: str, path: str) -> None:
    assert ask(store, method, path, b"x")[0] in (400, 404)


def test_a_huge_or_nameless_length_is_refused(store: GlooStore) -> None:
    for length, status in (("99999999999999", b"400"), ("-1", b"400"), ("many", b"400"), ("999999999", b"413")):
        with socket.create_connection(store.address, timeout=DEADLINE_S) as rank:
            rank.sendall(f"PUT {path_of(store)} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
            assert b" %b " % status in rank.recv(1000)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_without_the_secret_nothing_is_read_or_written(store: GlooStore, method: str) -> None:
    ask(store, "PUT", "/local_here/0", b"precious")
    port = store.address[1]
    guesses = ("", "/", f"/{store.secret}", f"/:{port}", f"/{'0' * 32}:{port}", f"/{store.secret[:-1]}:{port}")
    for guess in guesses:
        assert ask_as_stranger(store, method, f"{guess}/local_here/0", b"worthless") == (403, b""), guess
    assert ask(store, "GET", "/local_here/0") == (200, b"precious")


def test_each_store_has_its_own_secret(store: GlooStore) -> None:
    with contextlib.closing(GlooStore(2)) as other:
        assert other.secret != store.secret and len(store.secret) == 32


def test_ranks_cannot_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_store, "_LEAST_ROOM_BYTES", 100_000)
    with contextlib.closing(GlooStore(2)) as store:
        assert ask(store, "PUT", "/a/0", b"x" * 60_000)[0] == 200
        assert ask(store, "PUT", "/a/1", b"x" * 60_000)[0] == 507
        assert ask(store, "PUT", "/a/0", b"y" * 60_000)[0] == 200, "in the place of the other"
        many = [ask(store, "PUT", f"/b/{number}", b"")[0] for number in range(100)]
        assert many.count(507) > 10, "names count, too"
        assert ask(store, "DELETE", "/a/0")[0] == 200
        assert ask(store, "PUT", "/a/1", b"x" * 60_000)[0] == 200
        assert ask(store, "PUT", "/a/2", b"x" * 100_000)[0] == 413
        assert ask(store, "PUT", f"/a/{'k' * 600}", b"")[0] == 400


def test_silent_connections_do_not_block_ranks(store: GlooStore) -> None:
    """Many connections, held open: the oldest ones are closed, and ranks are served."""
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(store.address, DEADLINE_S)) for _ in range(200)]
        assert ask(store, "PUT", "/local_here/0", b"mine")[0] == 200
        assert strangers[0].recv(1) == b"", "closed"
        assert threading.active_count() < 150


def test_an_endless_request_is_disconnected(store: GlooStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_store, "_SECRET_TIMEOUT_S", 0.3)
    with socket.create_connection(store.address, timeout=DEADLINE_S) as stranger:
        with pytest.raises(OSError):
            for _ in range(DEADLINE_S * 100):
                stranger.sendall(b"x")
                time.sleep(0.01)


def test_a_waiting_rank_is_not_disconnected(store: GlooStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_store, "_SECRET_TIMEOUT_S", 0.1)
    with ThreadPoolExecutor(1) as pool:
        ask(store, "PUT", "/global/0", b"mine")
        waiting = pool.submit(ask, store, "GET", "/global/1")
        time.sleep(0.5)
        ask(store, "PUT", "/global/1", b"yours")
        assert waiting.result(DEADLINE_S) == (200, b"yours")


def test_a_rank_that_dies_during_a_put_stores_nothing(store: GlooStore) -> None:
    with socket.create_connection(store.address, timeout=DEADLINE_S) as dying:
        head = f"PUT {path_of(store, '/local_x/0')} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        dying.sendall(head.encode() + b"half")
    time.sleep(0.2)
    assert ask(store, "GET", "/local_x/0")[0] == 404


def test_close_answers_waiting_requests_and_releases_the_port() -> None:
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
