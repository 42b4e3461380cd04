"""The rendezvous before training, while other programs connect to its port."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any, BinaryIO

import psutil
import pytest
from rendezvous_threads import LONG_S, SHORT_S, VERSIONS, Impostor, Job, connected

from tfdistkit.cluster import ports
from tfdistkit.cluster.rendezvous import protocol
from tfdistkit.cluster.rendezvous.secret import SERVER, Session
from tfdistkit.errors import ClusterConfigError, RendezvousError

STRANGERS = {
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes": bytes(range(256)) + b"\n",
    "an endless line": b"x" * (2 * protocol.LONGEST_HELLO_BYTES),
    "deep nesting": b"[" * 200_000 + b"\n",
    "JSON of others": b'{"magic": "other"}\n',
    "half a hello": json.dumps({"magic": protocol.MAGIC, "kind": "hello", "rank": "1"}).encode() + b"\n",
    "an empty line": b"\n",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_other_programs_do_not_break_a_rendezvous(name: str) -> None:
    job = Job(2)
    job.start(0)
    with closing(connected(job.port)) as stranger:
        try:
            stranger.sendall(STRANGERS[name])
            while stranger.recv(1000):
                pass
        except ConnectionError:
            pass  # closed in the middle of its line
        job.start(1)
        job.assert_met(2)


def test_silent_connections_do_not_break_a_rendezvous() -> None:
    job = Job(2)
    job.start(0)
    with ExitStack() as stack:
        for _ in range(100):  # more than rank 0 keeps open
            stack.enter_context(closing(connected(job.port)))
        job.start(1)
        job.assert_met(2)
    assert ports.is_free("", job.port)


def test_other_programs_are_named_when_a_rank_is_missing() -> None:
    job = Job(2)
    job.start(0, SHORT_S)
    with closing(connected(job.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        (message,) = job.errors(RendezvousError)
    assert "Other programs connected to rank 0's port: 127.0.0.1:" in message
    assert "GET / HTTP/1.1" in message


SECRET = "a secret of one job"
# Invalid values of fields in a hello.
UNBOUNDED = {
    "remaining_s": 10**400,
    "rank": 10**300,
    "pid": -1,
    "host": "x" * 2000,
    "facts": {str(number): 1 for number in range(1000)},
}


@pytest.fixture(name="secret")
def set_secret(monkeypatch: pytest.MonkeyPatch) -> bytes:
    monkeypatch.setenv("TFDISTKIT_SECRET", SECRET)
    return SECRET.encode()


def hello(job: Job, **changes: object) -> bytes:
    fields = asdict(protocol.Hello(1, tuple(job.addresses), {**VERSIONS, "rank": 1}, "h", 1, "t", LONG_S))
    return protocol.encode("hello", **{**fields, **changes})


@contextlib.contextmanager
def in_place_of_rank_0(job: Job, secret: bytes) -> Iterator[tuple[dict[str, Any], Session, socket.socket, BinaryIO]]:
    """Listens at rank 0's port, and answers the knock of rank 1 with a challenge."""
    with closing(socket.create_server(("127.0.0.1", job.port))) as server:
        job.start(1, SHORT_S)
        server.settimeout(LONG_S)
        connection, _ = server.accept()
        with closing(connection), connection.makefile("rb") as file:
            knock = protocol.decode(file.readline())
            session = Session(secret, knock["nonce"], "n", SERVER)
            connection.sendall(session.sign(protocol.encode("challenge", nonce="n")))
            yield knock, session, connection, file


@pytest.mark.parametrize("name", UNBOUNDED)
def test_numbers_and_texts_are_bounded(name: str) -> None:
    job = Job(2)
    job.start(0)
    with closing(Impostor(job.port)) as stranger:
        stranger.say(hello(job, **{name: UNBOUNDED[name]}))
        assert stranger.hears_nothing()
    job.start(1)
    job.assert_met(2)


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-1", b"1e400"])
def test_a_deadline_is_a_number(constant: bytes) -> None:
    job = Job(2)
    job.start(0)
    with closing(Impostor(job.port)) as stranger:
        stranger.say(hello(job, remaining_s=12345).replace(b"12345", constant))
        assert stranger.hears_nothing()
    job.start(1)
    job.assert_met(2)


@pytest.mark.parametrize("changes", [{}, {"addresses": ["a:1"]}, {"rank": 0}, {"facts": {"tensorflow": "1.0"}}])
def test_without_the_secret_a_peer_neither_joins_nor_ends_a_job(secret: bytes, changes: dict[str, object]) -> None:
    job = Job(2)
    job.start(0)
    with closing(Impostor(job.port, b"another")) as stranger:
        assert not stranger.trusts
        stranger.say(hello(job, **changes))
        assert stranger.hears_nothing()
    job.start(1)
    job.assert_met(2)


def test_messages_cannot_be_replayed(secret: bytes) -> None:
    job = Job(3)
    job.start(0)
    said = hello(job, token="a rank's own")
    with closing(Impostor(job.port, secret)) as rank_1, closing(connected(job.port)) as stranger:
        rank_1.say(said)
        assert rank_1.hears()["kind"] == "welcome"
        knock = protocol.encode("knock", nonce="of the stranger", protocol=protocol.PROTOCOL)
        stranger.sendall(knock + rank_1.session.sign(said))
        with stranger.makefile("rb") as file:
            assert b"challenge" in file.readline()
            with contextlib.suppress(ConnectionError):
                assert file.read() == b""
    job.start(1)
    job.start(2)
    job.assert_met(3)


def test_another_protocol_does_not_end_a_job_with_a_secret(secret: bytes) -> None:
    job = Job(2)
    job.start(0)
    with closing(connected(job.port)) as stranger:
        stranger.sendall(hello(job, protocol=1))
        answer = stranger.makefile("rb").readline()
    assert b"another one there" in answer
    assert not any(address.encode() in answer for address in job.addresses)
    job.start(1)
    job.assert_met(2)


def test_another_program_at_rank_0s_port_learns_nothing(secret: bytes) -> None:
    job = Job(2)
    with in_place_of_rank_0(job, b"another") as (knock, _, _, file):
        assert file.read() == b""
        (message,) = job.errors(RendezvousError)
    assert set(knock) == {"magic", "kind", "nonce", "protocol"}
    assert "TFDISTKIT_SECRET" in message or "sends nothing" in message


def test_another_secret_is_named_on_both_sides(monkeypatch: pytest.MonkeyPatch, secret: bytes) -> None:
    monkeypatch.setattr("tfdistkit.cluster.rendezvous.client._WRONG_SECRET_S", 0.5)
    job = Job(2)
    job.start(0, SHORT_S)
    with closing(connected(job.port)):  # rank 0 has read its secret
        monkeypatch.setenv("TFDISTKIT_SECRET", "that of another job")
        job.start(1, LONG_S)
        of_rank_0, of_rank_1 = job.errors(RendezvousError)
    assert "127.0.0.1:" in of_rank_0 and "does it have another TFDISTKIT_SECRET?" in of_rank_0
    assert "has no TFDISTKIT_SECRET, or another one than this process" in of_rank_1
    assert SECRET not in of_rank_0 + of_rank_1


def test_a_peers_control_characters_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdistkit.cluster.rendezvous.server._LATE_COMERS_S", 0.1)
    job = Job(2)
    job.start(0)
    with closing(Impostor(job.port)) as peer:
        peer.say(hello(job, rank=0, host="\x1b]0;owned\x07host\x9b31m"))
        heard = peer.hears()
    assert "on \\x1b]0;owned\\x07host\\x9b31m" in heard["message"]
    (message,) = job.errors(ClusterConfigError)
    assert "\x1b" not in message and "\x07" not in message and "\x9b" not in message


def test_control_characters_in_rank_0s_error_are_escaped() -> None:
    job = Job(2)
    with in_place_of_rank_0(job, b"") as (_, session, connection, file):
        file.readline()
        connection.sendall(session.sign(protocol.encode("error", type="?", message="no\x1b[2J\nnext line")))
        (message,) = job.errors(RendezvousError)
    assert message == "no\\x1b[2J\nnext line"


def test_ranks_on_one_machine_are_not_reachable_from_others() -> None:
    job = Job(2)
    job.start(0)
    connected(job.port).close()
    listening = [one for one in psutil.Process().net_connections("tcp") if one.laddr.port == job.port]
    hosts = {one.laddr.ip for one in listening if one.status == psutil.CONN_LISTEN}
    job.start(1)
    job.assert_met(2)
    assert hosts and hosts <= {"127.0.0.1", "::1"}
