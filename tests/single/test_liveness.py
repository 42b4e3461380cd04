"""The liveness check of tasks, and the timeouts of a server for its coordinator."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tfdistkit import env
from tfdistkit.cluster import free_ports
from tfdistkit.cluster.liveness import Sign, Watch, look, wait_for
from tfdistkit.errors import RendezvousError

SOON_S = 20.0

# RFC 9113, 6.7: a PING is answered by the same 8 bytes with the flag ACK. Before it, as gRPC does, SETTINGS.
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def answer(connection: socket.socket) -> None:
    """Answers a client's preface, SETTINGS and PING as a gRPC server does."""
    heard = b""
    while len(heard) < 24 + 9 + 17:
        heard += connection.recv(100)
    assert heard.startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    payload = heard[-8:]
    connection.sendall(SETTINGS + bytes((0, 0, 8, 6)))
    connection.sendall(bytes((1, 0, 0, 0, 0)) + payload)


def hang_up(connection: socket.socket) -> None:
    """Closes the connection without an answer."""


@contextlib.contextmanager
def listening(speak: Callable[[socket.socket], None] | None, port: int = 0) -> Iterator[str]:
    """Listens, and serves each connection with `speak`; with None accepts none, as a stopped process."""
    with socket.create_server(("127.0.0.1", port)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(SOON_S)
                    assert speak is not None
                    with contextlib.suppress(OSError):
                        speak(connection)

        thread = threading.Thread(target=serve, daemon=True)
        if speak is not None:
            thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    if speak is not None:
        thread.join(SOON_S)


def nowhere() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def test_look() -> None:
    with listening(answer) as alive, listening(None) as stopped, listening(hang_up) as stranger:
        assert look(alive, SOON_S) is Sign.ALIVE
        assert look(stopped, 0.2) is Sign.SILENT
        assert look(stranger, SOON_S) is Sign.GONE
    assert look(nowhere(), SOON_S) is Sign.GONE
    assert look("no-such-host.invalid:2222", SOON_S) is Sign.GONE


def flood(connection: socket.socket) -> None:
    """Sends without end, as a program that took the port of a dead task might."""
    while True:
        connection.sendall(bytes(65_536))


def drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        time.sleep(0.001)


def test_endless_answers_do_not_block_the_check() -> None:
    with listening(flood) as flooding, listening(drip) as dripping:
        assert look(flooding, SOON_S) is Sign.GONE
        assert look(dripping, 0.3) is Sign.SILENT


def test_waiting_for_tasks() -> None:
    with listening(answer) as alive, listening(None) as stopped:
        gone = nowhere()
        assert wait_for({"worker 0": alive}, SOON_S) == {}
        found = wait_for({"worker 0": alive, "worker 1": stopped, "ps 0": gone}, 1.0)
        assert found == {"worker 1": Sign.SILENT, "ps 0": Sign.GONE}


def test_waiting_ends_when_a_late_task_starts() -> None:
    port = free_ports(1)[0]
    waited: list[dict[str, Sign]] = []
    thread = threading.Thread(target=lambda: waited.append(wait_for({"ps 0": f"127.0.0.1:{port}"}, SOON_S)))
    thread.start()
    time.sleep(0.3)
    with listening(answer, port):
        thread.join(SOON_S)
    assert waited == [{}]


def test_a_watch_measures_the_silence() -> None:
    port = free_ports(1)[0]
    with listening(None) as stopped, listening(answer) as alive:
        with listening(answer, port) as ending:
            watch = Watch({"worker 0": ending, "worker 1": stopped, "ps 0": alive})
            names = ["worker 0", "worker 1", "ps 0"]
            assert watch.missing(names, 60.0) == []
        deadline = time.monotonic() + SOON_S
        while watch.missing(names, 1.5) != ["worker 0", "worker 1"]:
            assert time.monotonic() < deadline, [watch.missing_for(name) for name in names]
            time.sleep(0.05)
        assert (watch.sign("worker 0"), watch.sign("worker 1")) == (Sign.GONE, Sign.SILENT)
        with listening(answer, port):  # It restarts.
            while watch.missing(names, 1.5) != ["worker 1"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        watch.stop()


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> object:
    """The module, with less patience."""
    from tfdistkit.strategies.parameter_server import server as serving

    for name, seconds in {"_GRACE_S": 2.0, "_GRACE_UNDER_LAUNCHER_S": 0.1, "_SILENT_GRACE_S": 3.0}.items():
        monkeypatch.setattr(serving, name, seconds)
    monkeypatch.setattr(serving, "_POLL_EVERY_S", 0.05)
    monkeypatch.setattr(serving, "_PROBE_TIMEOUT_S", 0.5)
    return serving


def watch_in_thread(serving: Any, address: str) -> threading.Thread:
    arguments = (address, SOON_S, "ps 0", serving._EndSignals())
    thread = threading.Thread(target=serving._watch, args=arguments, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    return thread


@pytest.mark.tensorflow
def test_a_server_outlives_a_coordinator_that_starts_again(serving: object) -> None:
    port = free_ports(1)[0]
    with listening(answer, port) as address:
        thread = watch_in_thread(serving, address)
    time.sleep(1.0)
    with listening(answer, port):
        thread.join(2.0)
        assert thread.is_alive()
    start = time.monotonic()
    thread.join(SOON_S)
    assert not thread.is_alive() and time.monotonic() - start >= 1.0


@pytest.mark.tensorflow
def test_a_server_under_the_launcher_ends_with_the_coordinator(
    serving: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.PARENT_PID, "1")
    monkeypatch.setattr(serving, "_GRACE_S", 1000.0)
    with listening(answer) as address:
        thread = watch_in_thread(serving, address)
    thread.join(SOON_S)
    assert not thread.is_alive()


@pytest.mark.tensorflow
def test_a_server_gives_a_silent_coordinator_up_later(serving: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_GRACE_S", 0.0)
    port = free_ports(1)[0]
    with listening(answer, port) as address:
        thread = watch_in_thread(serving, address)
        monkeypatch.setattr(serving, "look", lambda address, timeout_s: Sign.SILENT)
        start = time.monotonic()
        thread.join(SOON_S)
        assert not thread.is_alive() and time.monotonic() - start >= 2.0


@pytest.mark.tensorflow
def test_a_server_whose_coordinator_never_comes_says_so(serving: object) -> None:
    with listening(None) as stopped:
        for address, seen in ((nowhere(), "nothing listens there"), (stopped, "does not answer")):
            with pytest.raises(RendezvousError, match=rf"within 1 seconds(.|\n)*{seen}(.|\n)*ps 0 waited for it"):
                serving._watch(address, 1, "ps 0", serving._EndSignals())  # type: ignore


@pytest.mark.tensorflow
def test_a_server_with_sigterm_outlives_the_coordinator(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(serving.os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr(serving.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(serving, "_GRACE_S", 1000.0)

    def told_while_it_lives(lives_s: float) -> float:
        told = serving._EndSignals()
        with listening(answer) as address:
            arguments = (address, SOON_S, "ps 0", told)
            thread = threading.Thread(target=serving._watch, args=arguments, daemon=True)
            thread.start()
            time.sleep(0.5)
            told.take(signal.SIGUSR1, None)
            start = time.monotonic()
            thread.join(lives_s)
        thread.join(SOON_S)
        assert not thread.is_alive()
        return time.monotonic() - start

    assert told_while_it_lives(1.0) >= 1.0 and not killed, "it ends well, after the coordinator"
    monkeypatch.setattr(serving, "_BACKUP_GRACE_S", 0.5)
    assert told_while_it_lives(SOON_S) < SOON_S and killed == [signal.SIGUSR1]
    told = serving._EndSignals()
    told.take(signal.SIGTERM, None)
    serving._watch(nowhere(), 60, "ps 0", told)  # Nobody needs it.
    assert killed == [signal.SIGUSR1, signal.SIGTERM]


def test_it_needs_no_tensorflow() -> None:
    code = "import sys, tfdistkit.cluster.liveness; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
