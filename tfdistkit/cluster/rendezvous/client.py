"""Ranks other than 0 in a rendezvous: come to rank 0's address, say hello, wait for the outcome."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import replace
from typing import Any

from tfdistkit import env
from tfdistkit.cluster.addresses import split_address
from tfdistkit.cluster.rendezvous import protocol as wire
from tfdistkit.cluster.rendezvous.secret import GUEST, Session, WrongSecret, job_secret, new_nonce
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, RendezvousError, explain

_log = logging.getLogger("tfdistkit.cluster")

# How long to wait between two attempts: rank 0 may come later. Grows from the first to the second.
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.2
# One attempt to connect, and one wait for rank 0's first answer, before trying again.
_CONNECT_S = 5.0
_WELCOME_S = 10.0
_FIRST_NOTE_S = 10.0
_NEXT_NOTE_S = 30.0
# Whoever answers without the secret of the job may be a stranger that goes away again; not after so long.
_WRONG_SECRET_S = 10.0
_SILENT = "it accepts connections, but says nothing: is it stopped?"


class _TryAgain(Exception):
    """This attempt failed; says why."""


class Guest:
    """One process's way through a rendezvous that rank 0 holds.

    Args:
        spec: The cluster.
        hello: What this process says.
        deadline: When to give up, on the clock of `time.monotonic`.
    """

    def __init__(self, spec: ClusterSpec, hello: wire.Hello, deadline: float):
        self._spec = spec
        self._hello = hello
        self._deadline = deadline
        self._host, self._port = split_address(spec.workers[0])
        self._longest_line = wire.LONGEST_HELLO_BYTES * spec.world_size
        self._secret = job_secret()
        self._wrong_since: float | None = None
        self._reason = "no attempt was made"
        self._next_note = time.monotonic() + _FIRST_NOTE_S

    def run(self) -> tuple[wire.Facts, ...]:
        """Returns the facts of all ranks.

        Raises:
            RendezvousError: if rank 0 could not be reached, or did not answer; or whatever it announced.
            ClusterConfigError: if rank 0 announced it.
        """
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                with contextlib.closing(self._connect()) as connection:
                    return self._talk(connection)
            except RendezvousError:
                raise  # announced by rank 0; as a TimeoutError it is an OSError too
            except _TryAgain as failure:
                self._reason = str(failure)
            except OSError as failure:
                self._reason = f"the connection broke: {failure.strerror or failure}"
            if self._left_s() <= 0:
                raise self._unreachable()
            self._note()
            time.sleep(min(pause_s, self._left_s()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _note(self) -> None:
        now = time.monotonic()
        if now >= self._next_note:
            self._next_note = now + _NEXT_NOTE_S
            address = self._spec.workers[0]
            _log.warning("Rank 0 at %s: %s. Trying for %.0f s more.", address, self._reason, self._left_s())

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _connect(self) -> socket.socket:
        for family, address in self._resolve():
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                # If this end's port is the very port of some worker's server, it does not stay taken afterwards.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                connection.settimeout(max(0.01, min(_CONNECT_S, self._left_s())))
                connection.connect(address)
                if connection.getsockname() == connection.getpeername():
                    # Nobody listens, and the system gave us rank 0's port for our own end: TCP then connects
                    # a socket with itself.
                    wire.close_abruptly(connection)
                    raise ConnectionRefusedError("Connection refused")
                return connection
            except TimeoutError:
                connection.close()
                self._reason = "connecting timed out: a firewall, or the machine is not up"
            except OSError as failure:
                connection.close()
                self._reason = (failure.strerror or str(failure)).lower()
        raise _TryAgain(self._reason)

    def _resolve(self) -> list[tuple[socket.AddressFamily, Any]]:
        """Looks the host up in a thread: the system's resolver knows no deadline."""
        found: list[tuple[socket.AddressFamily, Any]] = []
        failure = ["looking up the name of its host timed out"]

        def look_up() -> None:
            try:
                answer = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                found.extend((family, address) for family, _, _, _, address in answer)
            except OSError as error:
                failure[0] = f"the name of its host does not resolve ({error.strerror or error})"

        thread = threading.Thread(target=look_up, name="tfdistkit-resolve", daemon=True)
        thread.start()
        thread.join(self._left_s() + 0.01)
        if not found:
            raise _TryAgain(failure[0])
        return list(found)

    def _talk(self, connection: socket.socket) -> tuple[wire.Facts, ...]:
        connection.settimeout(max(0.01, self._left_s()))
        lines = _Lines(connection, self._longest_line)
        welcome_by = min(self._deadline, time.monotonic() + _WELCOME_S)
        session = self._introduce(connection, lines, welcome_by)
        connection.settimeout(max(0.01, self._left_s()))
        connection.sendall(session.sign(wire.encode_hello(replace(self._hello, remaining_s=self._left_s()))))
        message = self._next(lines, welcome_by, _SILENT, session)
        while True:
            if message["kind"] == "ready?":
                with contextlib.suppress(OSError):  # closed while this one was stopped: the outcome can still be read
                    connection.sendall(session.sign(wire.encode("ready")))
            elif message["kind"] == "result":
                return _result(message, self._spec.world_size)
            elif message["kind"] == "error":
                raise _announced(message)
            silence = "it welcomed this process, then fell silent: is it stopped?"
            message = self._next(lines, self._deadline, silence, session)

    def _introduce(self, connection: socket.socket, lines: _Lines, until: float) -> Session:
        """Lets rank 0 prove that it knows the secret: nobody else is told anything of this job."""
        nonce = new_nonce()
        connection.sendall(wire.encode("knock", nonce=nonce, protocol=wire.PROTOCOL))
        line = self._line(lines, until, _SILENT)
        first = self._decoded(line[max(0, line.find(b"{")) :])  # signed, unless rank 0 has another version
        if first["kind"] == "error" and not self._secret:
            raise _announced(first)
        if first["kind"] != "challenge":
            raise _TryAgain("another version of tfdistkit answers there")
        try:
            session = Session(self._secret, nonce, wire.decode_nonce(first), GUEST)
        except wire.NotOurs as other:
            raise _not_ours(other) from None
        try:
            session.verified(line)
        except WrongSecret:
            self._note_wrong_secret()
        return session

    def _note_wrong_secret(self) -> None:
        """One that holds rank 0's port so long keeps rank 0 from it, too."""
        now = time.monotonic()
        self._wrong_since = self._wrong_since or now
        self._reason = f"who answers there does not know this process's {env.SECRET}, or has another"
        if now - self._wrong_since > _WRONG_SECRET_S:
            raise self._unreachable()
        raise _TryAgain(self._reason)

    def _next(self, lines: _Lines, until: float, silence: str, session: Session) -> dict[str, Any]:
        line = self._line(lines, until, silence)
        try:
            return self._decoded(session.verified(line))
        except WrongSecret as other:
            raise _TryAgain(f"it says {other}") from None

    def _line(self, lines: _Lines, until: float, silence: str) -> bytes:
        try:
            return lines.read(until)
        except wire.NotOurs as other:
            raise _not_ours(other) from None
        except TimeoutError:
            raise _TryAgain(silence) from None

    def _decoded(self, line: bytes) -> dict[str, Any]:
        try:
            return wire.decode(line)
        except wire.NotOurs as other:
            raise _not_ours(other) from None

    def _unreachable(self) -> RendezvousError:
        address = self._spec.workers[0]
        own = f"rank {self._hello.rank} (pid {self._hello.pid} on {self._hello.host})"
        waited_s = self._hello.remaining_s - self._left_s()
        return RendezvousError(
            explain(
                f"Rank 0 at {address} could not be reached within {waited_s:.1f} s by {own}: {self._reason}.",
                do=f"Look at the log of rank 0, and whether this machine may connect to {address}. "
                "If rank 0 only starts later, raise `timeout_s`.",
            )
        )


class _Lines:
    """Reads one line after the other from a connection, each with a deadline and a largest size."""

    def __init__(self, connection: socket.socket, longest: int):
        self._connection = connection
        self._longest = longest
        self._buffer = b""

    def read(self, until: float) -> bytes:
        """Returns the next line without its end.

        Raises:
            TimeoutError: if it has not come by then.
            _TryAgain: if the connection was closed.
            NotOurs: if the line is too long.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > self._longest:
                raise wire.NotOurs(wire.shown(self._buffer))
            # Even past the deadline, what is there already is read: this process may have been stopped itself.
            self._connection.settimeout(max(0.001, until - time.monotonic()))
            part = self._connection.recv(65536)
            if not part:
                raise _TryAgain("it was there, but closed the connection")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _not_ours(said: wire.NotOurs) -> _TryAgain:
    return _TryAgain(f"something that is not tfdistkit answers there: {said}")


def _result(message: dict[str, Any], world_size: int) -> tuple[wire.Facts, ...]:
    facts = message.get("facts")
    if not isinstance(facts, list) or len(facts) != world_size or not all(wire.are_facts(one) for one in facts):
        raise _TryAgain("its result makes no sense")
    return tuple(facts)


def _announced(message: dict[str, Any]) -> Exception:
    kind = ClusterConfigError if message.get("type") == "ClusterConfigError" else RendezvousError
    return kind(wire.printable(str(message.get("message"))))
