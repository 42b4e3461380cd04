"""The rendezvous before training, each rank in a thread of this process: contradictions and deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from patience import longer
from rendezvous_threads import LONG_S, SHORT_S, VERSIONS, Impostor, Job, connected

from tfdistkit.cluster import ClusterSpec, TaskSpec, exchange_facts, ports
from tfdistkit.cluster.rendezvous import protocol
from tfdistkit.errors import ClusterConfigError, OptionError, RendezvousError


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_gets_the_facts_of_all(size: int) -> None:
    job = Job(size)
    for rank in reversed(range(size)):  # rank 0 starts last
        job.start(rank, seed=100 + rank)
    job.assert_met(size)
    for outcome in job.outcomes():
        assert outcome.rendezvous is not None
        assert [one["seed"] for one in outcome.rendezvous.facts] == [100 + rank for rank in range(size)]


@pytest.mark.parametrize("host", ["localhost", "[::1]", socket.gethostname()])
def test_kinds_of_hosts(host: str) -> None:
    if host == "[::1]" and not ports.has_ipv6():
        host = "127.0.0.1"
    job = Job(2, host)
    for rank in range(2):
        job.start(rank)
    job.assert_met(2)


def test_rank_0_may_start_late() -> None:
    job = Job(2)
    job.start(1)
    time.sleep(1.0)
    job.start(0)
    job.assert_met(2)


def test_a_name_may_start_to_resolve_late(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up, tried = socket.getaddrinfo, []

    def slow(host: str, *arguments: object, **options: object) -> object:
        if threading.current_thread().name == "tfdistkit-resolve":
            tried.append(host)
            if len(tried) < 3:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(host, *arguments, **options)  # type: ignore[arg-type]

    job = Job(2)
    monkeypatch.setattr("tfdistkit.cluster.rendezvous.client.socket.getaddrinfo", slow)
    job.start(1)
    job.start(0)
    job.assert_met(2)
    assert len(tried) >= 3


def test_the_port_is_free_again_at_once() -> None:
    job = Job(3)
    for rank in range(3):
        job.start(rank)
    job.assert_met(3)
    # Without SO_REUSEADDR, even a connection in TIME_WAIT keeps the port taken.
    for held in ports.bind("", job.port, exclusive=True):
        held.listen()
        held.close()


def test_the_port_is_free_again_after_a_failure_too() -> None:
    job = Job(3)
    for rank in range(2):
        job.start(rank, SHORT_S)
    job.errors(RendezvousError)
    assert ports.is_free("", job.port)


def test_every_rank_gets_the_names_of_missing_ranks() -> None:
    job = Job(4)
    for rank in (0, 2):
        job.start(rank, SHORT_S)
    messages = job.errors(RendezvousError)
    assert messages[0] == messages[1]
    assert f"rank 1 ({job.addresses[1]}), rank 3 ({job.addresses[3]}) did not join" in messages[0]
    assert "rank 2" not in messages[0]


def test_the_earliest_deadline_applies_to_all_ranks() -> None:
    job = Job(3)
    job.start(0, LONG_S)
    job.start(1, SHORT_S)
    start = time.monotonic()
    messages = job.errors(RendezvousError)
    assert time.monotonic() - start < longer(LONG_S / 2)
    assert all(f"rank 2 ({job.addresses[2]}) did not join" in message for message in messages)


def test_rank_0_is_not_started() -> None:
    job = Job(3)
    for rank in (1, 2):
        job.start(rank, SHORT_S)
    for message in job.errors(RendezvousError):
        assert f"Rank 0 at {job.addresses[0]} could not be reached" in message
        assert "connection refused" in message


def test_rank_0_has_no_address() -> None:
    job = Job(2)
    job.start(1, SHORT_S, addresses=["no-such-host.invalid:12345", job.addresses[1]])
    (message,) = job.errors(RendezvousError)
    assert "does not resolve" in message


def test_a_resolver_that_hangs_does_not_outlast_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(
        "tfdistkit.cluster.rendezvous.client.socket.getaddrinfo", lambda *_, **__: [][hang.wait(LONG_S) :]
    )
    job = Job(2)
    job.start(1, SHORT_S)
    try:
        assert "timed out" in job.errors(RendezvousError)[0]
    finally:
        hang.set()


def test_another_program_listens_at_rank_0s_port() -> None:
    job = Job(2)
    with closing(socket.create_server(("127.0.0.1", job.port))) as server:
        job.start(1, SHORT_S)
        server.settimeout(LONG_S)
        connection, _ = server.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        (message,) = job.errors(RendezvousError)
        connection.close()
    assert "not tfdistkit" in message or "sends nothing" in message


def test_a_program_that_never_answers_at_rank_0s_port() -> None:
    job = Job(2)
    with closing(socket.create_server(("127.0.0.1", job.port))):
        job.start(1, SHORT_S)
        (message,) = job.errors(RendezvousError)
    assert "sends nothing" in message


def test_rank_0s_port_is_taken() -> None:
    job = Job(2)
    with closing(socket.create_server(("127.0.0.1", job.port))):
        job.start(0, LONG_S)
        (message,) = job.errors(ClusterConfigError)
    assert f"Port {job.port} of this task is taken" in message


def test_another_number_of_processes() -> None:
    job = Job(3)
    job.start(0, LONG_S)
    job.start(1, LONG_S, addresses=job.addresses[:2])
    job.start(2, LONG_S)
    messages = job.errors(ClusterConfigError)
    assert len(set(messages)) == 1
    assert "Rank 1" in messages[0] and "must have the same number" in messages[0]
    assert f"2 there: [{', '.join(job.addresses[:2])}]" in messages[0]
    assert f"3 training processes, [{', '.join(job.addresses)}]" in messages[0]


def test_another_list_of_addresses() -> None:
    job = Job(3)
    other = [*job.addresses[:2], "elsewhere:1"]
    job.start(0, LONG_S)
    job.start(1, LONG_S, addresses=other)
    job.start(2, LONG_S)
    messages = job.errors(ClusterConfigError)
    assert len(set(messages)) == 1
    assert f"rank 2 is elsewhere:1 there, {job.addresses[2]} on rank 0" in messages[0]


def test_a_duplicate_rank() -> None:
    job = Job(3)
    job.start(0, LONG_S)
    job.start(1, LONG_S)
    job.start(1, LONG_S)
    job.wait_for(2)
    job.start(2, LONG_S)
    messages = job.errors(ClusterConfigError)
    assert len(set(messages)) == 1
    assert "Rank 1 must be a single process" in messages[0]


def test_a_late_rank_gets_the_error_too() -> None:
    job = Job(3)
    job.start(0, LONG_S)
    job.start(1, LONG_S, addresses=job.addresses[:2])
    job.wait_for(1)
    job.start(2, LONG_S)
    assert len(set(job.errors(ClusterConfigError))) == 1


def test_different_versions() -> None:
    job = Job(3)
    job.start(0, LONG_S)
    job.start(1, LONG_S)
    job.start(2, LONG_S, tensorflow="2.19.0", python="3.12")
    messages = job.errors(ClusterConfigError)
    assert len(set(messages)) == 1
    assert "must have the same version of tensorflow." in messages[0]
    table = [line.split() for line in messages[0].splitlines()[-4:]]
    assert table == [["rank", "tensorflow"], ["0", "2.21.0"], ["1", "2.21.0"], ["2", "2.19.0"]]


def test_another_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdistkit.cluster.rendezvous.server._LATE_COMERS_S", 0.1)
    job = Job(2)
    job.start(0, LONG_S)
    with closing(connected(job.port)) as connection:
        hello = protocol.Hello(1, tuple(job.addresses), {"tfdistkit": "9.0"}, "h", 1, "t", LONG_S, protocol=1)
        connection.sendall(protocol.encode_hello(hello))  # the first message of protocol 1
        answer = protocol.decode(connection.makefile("rb").readline())
    assert answer["kind"] == "error"
    assert "0.1.0 on rank 0, another one there" in answer["message"]
    assert [str(one.error) for one in job.outcomes()] == [answer["message"]]


def test_a_restarted_rank_can_join_again() -> None:
    job = Job(3)
    job.start(0)
    hello = protocol.Hello(1, tuple(job.addresses), {**VERSIONS, "rank": 1}, "h", 1, "first", LONG_S)
    with closing(Impostor(job.port)) as first:
        first.say(protocol.encode_hello(hello))
        assert first.hears()["kind"] == "welcome"
    job.start(1)
    job.start(2)
    job.assert_met(3)


def test_a_rank_that_no_longer_answers_is_named() -> None:
    job = Job(3)
    job.start(0, SHORT_S)
    job.start(2, SHORT_S)
    hello = protocol.Hello(1, tuple(job.addresses), VERSIONS, "h", 1, "t", SHORT_S)
    with closing(Impostor(job.port)) as stopped:
        stopped.say(protocol.encode_hello(hello))
        messages = job.errors(RendezvousError)
    assert len(set(messages)) == 1
    assert f"rank 1 ({job.addresses[1]}) joined, but no longer answered" in messages[0]


def test_a_long_wait_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("tfdistkit.cluster.rendezvous.server._FIRST_NOTE_S", 0.1)
    job = Job(2)
    job.start(0)
    wait_until(lambda: f"Waiting for rank 1 ({job.addresses[1]})" in caplog.text)
    job.start(1)
    job.assert_met(2)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
def test_the_deadline_is_a_positive_number(timeout_s: float) -> None:
    with pytest.raises(OptionError, match="timeout_s"):
        exchange_facts(ClusterSpec(), {}, timeout_s)


def test_facts_are_texts_and_numbers() -> None:
    with pytest.raises(OptionError, match="facts"):
        exchange_facts(ClusterSpec(), {"a": 0.5}, 1)  # type: ignore[dict-item]


def test_all_addresses_must_be_known() -> None:
    with pytest.raises(ClusterConfigError, match="no address of rank 0"):
        exchange_facts(ClusterSpec({"worker": ("", "h2:2")}, TaskSpec("worker", 1)), {}, 1)


def test_a_parameter_server_does_not_join() -> None:
    with pytest.raises(ClusterConfigError, match="defined for training processes only"):
        exchange_facts(ClusterSpec({"worker": ("h1:1",), "ps": ("h2:2",)}, TaskSpec("ps")), {}, 1)
