"""Runs a rendezvous on ranks other than 0: connects to rank 0, sends a hello, waits for the result."""

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
from tfdistkit.cluster.rendezvous.secret import CLIENT, Session, WrongSecret, job_secret, new_nonce
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, RendezvousError, explain

_log = logging.getLogger("tfdistkit.cluster")

# Seconds between two attempts, as rank 0 may start later. Grows from the first to the second value.
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.2
# Timeouts in seconds of one attempt to connect, and of rank 0's first answer, before a retry.
_CONNECT_S = 5.0
_WELCOME_S = 10.0
_FIRST_NOTE_S = 10.0
_NEXT_NOTE_S = 30.0
# Seconds of retries while another program answers without the secret: it may release the port.
_WRONG_SECRET_S = 10.0
_SILENT = "it accepts connections but sends nothing: is it stopped?"


class _TryAgain(Exception):
    """An attempt failed; its text is the reason."""


class Client:
    """Joins a rendezvous at rank 0.

    Args:
        spec: The cluster.
        hello: The hello of this process.
        deadline: The deadline, on the clock of `time.monotonic`.
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
            RendezvousError: if rank 0 is unreachable, does not answer, or sends this error.
            ClusterConfigError: if rank 0 sends this error.
        """
        pause_s = _SHORTEST_PAUSE_S
        while True:
            try:
                with contextlib.closing(self._connect()) as connection:
                    return self._join(connection)
            except RendezvousError:
                raise  # sent by rank 0; caught here because a TimeoutError is an OSError
            except _TryAgain as failure:
                self._reason = str(failure)
            except OSError as failure:
                self._reason = f"the connection broke: {failure.strerror or failure}"
            if self._left_s() <= 0:
                raise self._unreachable()
            self._log_waiting()
            time.sleep(min(pause_s, self._left_s()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _log_waiting(self) -> None:
        now = time.monotonic()
        if now >= self._next_note:
            self._next_note = now + _NEXT_NOTE_S
            address = self._spec.workers[0]
            _log.warning("Rank 0 at %s: %s. Retrying for %.0f s.", address, self._reason, self._left_s())

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _connect(self) -> socket.socket:
        for family, address in self._resolve():
            connection = socket.socket(family, socket.SOCK_STREAM)
            try:
                # If the system chooses the port of a worker's server for this end, the server can still bind it later.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                connection.settimeout(max(0.01, min(_CONNECT_S, self._left_s())))
                connection.connect(address)
                if connection.getsockname() == connection.getpeername():
                    # No process listens, and the system chose rank 0's port for this end: TCP has connected the
                    # socket with itself.
                    wire.close_abruptly(connection)
                    raise ConnectionRefusedError("Connection refused")
                return connection
            except TimeoutError:
                connection.close()
                self._reason = "the connection timed out: a firewall, or the machine is down"
            except OSError as failure:
                connection.close()
                self._reason = (failure.strerror or str(failure)).lower()
        raise _TryAgain(self._reason)

    def _resolve(self) -> list[tuple[socket.AddressFamily, Any]]:
        """Resolves the host in a thread: the system's resolver has no timeout."""
        found: list[tuple[socket.AddressFamily, Any]] = []
        failure = ["the lookup of its host name timed out"]

        def resolve() -> None:
            try:
                answer = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                found.extend((family, address) for family, _, _, _, address in answer)
            except OSError as error:
                failure[0] = f"its host name does not resolve ({error.strerror or error})"

        thread = threading.Thread(target=resolve, name="tfdistkit-resolve", daemon=True)
        thread.start()
        thread.join(self._left_s() + 0.01)
        if not found:
            raise _TryAgain(failure[0])
        return list(found)

    def _join(self, connection: socket.socket) -> tuple[wire.Facts, ...]:
        connection.settimeout(max(0.01, self._left_s()))
        lines = _Lines(connection, self._longest_line)
        welcome_by = min(self._deadline, time.monotonic() + _WELCOME_S)
        session = self._authenticate(connection, lines, welcome_by)
        connection.settimeout(max(0.01, self._left_s()))
        connection.sendall(session.sign(wire.encode_hello(replace(self._hello, remaining_s=self._left_s()))))
        message = self._next(lines, welcome_by, _SILENT, session)
        while True:
            if message["kind"] == "ready?":
                with contextlib.suppress(
                    OSError
                ):  # closed while this process was stopped: the result can still be read
                    connection.sendall(session.sign(wire.encode("ready")))
            elif message["kind"] == "result":
                return _result(message, self._spec.world_size)
            elif message["kind"] == "error":
                raise _announced(message)
            silence = "it accepted this process, then stopped answering: is it stopped?"
            message = self._next(lines, self._deadline, silence, session)

    def _authenticate(self, connection: socket.socket, lines: _Lines, until: float) -> Session:
        """Verifies that rank 0 knows the secret, before this process sends anything about the job."""
        nonce = new_nonce()
        connection.sendall(wire.encode("knock", nonce=nonce, protocol=wire.PROTOCOL))
        line = self._line(lines, until, _SILENT)
        first = self._decoded(
            line[max(0, line.find(b"{")) :]
        )  # signed, unless rank 0 has another version of the protocol
        if first["kind"] == "error" and not self._secret:
            raise _announced(first)
        if first["kind"] != "challenge":
            raise _TryAgain("another version of tfdistkit answers there")
        try:
            session = Session(self._secret, nonce, wire.decode_nonce(first), CLIENT)
        except wire.NotOurs as other:
            raise _other_program(other) from None
        try:
            session.verified(line)
        except WrongSecret:
            self._retry_wrong_secret()
        return session

    def _retry_wrong_secret(self) -> None:
        """Retries until the program at rank 0's port has held it too long: it keeps rank 0 from the port, too."""
        now = time.monotonic()
        self._wrong_since = self._wrong_since or now
        self._reason = f"the program that answers there has no {env.SECRET}, or another one than this process"
        if now - self._wrong_since > _WRONG_SECRET_S:
            raise self._unreachable()
        raise _TryAgain(self._reason)

    def _next(self, lines: _Lines, until: float, silence: str, session: Session) -> dict[str, Any]:
        line = self._line(lines, until, silence)
        try:
            return self._decoded(session.verified(line))
        except WrongSecret as other:
            raise _TryAgain(f"it sent {other}") from None

    def _line(self, lines: _Lines, until: float, silence: str) -> bytes:
        try:
            return lines.read(until)
        except wire.NotOurs as other:
            raise _other_program(other) from None
        except TimeoutError:
            raise _TryAgain(silence) from None

    def _decoded(self, line: bytes) -> dict[str, Any]:
        try:
            return wire.decode(line)
        except wire.NotOurs as other:
            raise _other_program(other) from None

    def _unreachable(self) -> RendezvousError:
        address = self._spec.workers[0]
        own = f"rank {self._hello.rank} (pid {self._hello.pid} on {self._hello.host})"
        waited_s = self._hello.remaining_s - self._left_s()
        return RendezvousError(
            explain(
                f"Rank 0 at {address} could not be reached within {waited_s:.1f} s by {own}: {self._reason}.",
                do=f"Read the log of rank 0, and check that this machine can connect to {address}. "
                "If rank 0 starts later, raise `timeout_s`.",
            )
        )


class _Lines:
    """Reads lines from a connection, each with a deadline and a size limit."""

    def __init__(self, connection: socket.socket, longest: int):
        self._connection = connection
        self._longest = longest
        self._buffer = b""

    def read(self, until: float) -> bytes:
        """Returns the next line without its end.

        Raises:
            TimeoutError: if it is incomplete at the deadline.
            _TryAgain: if the connection was closed.
            NotOurs: if the line is too long.
        """
        while b"\n" not in self._buffer:
            if len(self._buffer) > self._longest:
                raise wire.NotOurs(wire.shown(self._buffer))
            # Reads available bytes even past the deadline: this process may have been stopped itself.
            self._connection.settimeout(max(0.001, until - time.monotonic()))
            part = self._connection.recv(65536)
            if not part:
                raise _TryAgain("it accepted the connection, then closed it")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _other_program(error: wire.NotOurs) -> _TryAgain:
    return _TryAgain(f"a program that is not tfdistkit answers there: {error}")


def _result(message: dict[str, Any], world_size: int) -> tuple[wire.Facts, ...]:
    facts = message.get("facts")
    if not isinstance(facts, list) or len(facts) != world_size or not all(wire.are_facts(one) for one in facts):
        raise _TryAgain("its result is malformed")
    return tuple(facts)


def _announced(message: dict[str, Any]) -> Exception:
    kind = ClusterConfigError if message.get("type") == "ClusterConfigError" else RendezvousError
    return kind(wire.printable(str(message.get("message"))))
