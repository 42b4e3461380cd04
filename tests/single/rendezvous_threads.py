"""A job whose ranks are threads of this process, for the tests of the rendezvous before training."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from tfdistkit.cluster import ClusterSpec, Rendezvous, TaskSpec, exchange_facts, free_ports
from tfdistkit.cluster.rendezvous import protocol
from tfdistkit.cluster.rendezvous.secret import CLIENT, Session, WrongSecret, new_nonce

# Long enough for a loaded machine; reached only when something is broken.
LONG_S = 60.0
# For rendezvous that must fail at their deadline.
SHORT_S = 2.5

VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1", "tfdistkit": "0.1.0"}


@dataclass
class Outcome:
    rendezvous: Rendezvous | None = None
    error: Exception | None = None


def attend(outcome: Outcome, spec: ClusterSpec, facts: dict[str, str | int], timeout_s: float) -> None:
    try:
        outcome.rendezvous = exchange_facts(spec, facts, timeout_s)
    except Exception as error:
        outcome.error = error


class Job:
    """Starts ranks as threads and collects their outcomes."""

    def __init__(self, size: int, host: str = "127.0.0.1"):
        self.addresses = [f"{host}:{port}" for port in free_ports(size)]
        self.port = int(self.addresses[0].rpartition(":")[2])
        self._started: list[tuple[threading.Thread, Outcome]] = []

    def spec(self, rank: int, addresses: list[str] | None = None) -> ClusterSpec:
        listed = tuple(self.addresses if addresses is None else addresses)
        return ClusterSpec({"worker": listed}, TaskSpec("worker", rank), source="TF_CONFIG")

    def start(
        self, rank: int, timeout_s: float = LONG_S, addresses: list[str] | None = None, **facts: str | int
    ) -> None:
        outcome = Outcome()
        arguments = (outcome, self.spec(rank, addresses), {**VERSIONS, "rank": rank, **facts}, timeout_s)
        thread = threading.Thread(target=attend, args=arguments, daemon=True)
        thread.start()
        self._started.append((thread, outcome))

    def wait_for(self, start: int) -> None:
        """Waits until the rank that was started as number `start` has its outcome."""
        thread, _ = self._started[start]
        thread.join(LONG_S + 10)
        assert not thread.is_alive(), "a rank hangs beyond its deadline"

    def outcomes(self) -> list[Outcome]:
        """Returns the outcomes in the order of the starts."""
        for start in range(len(self._started)):
            self.wait_for(start)
        return [outcome for _, outcome in self._started]

    def errors(self, kind: type[Exception]) -> list[str]:
        """Returns the error messages of all ranks, which must be of one kind."""
        outcomes = self.outcomes()
        assert [type(outcome.error) for outcome in outcomes] == [kind] * len(outcomes), outcomes
        return [str(outcome.error) for outcome in outcomes]

    def assert_met(self, size: int) -> None:
        for outcome in self.outcomes():
            assert outcome.error is None, outcome.error
            assert outcome.rendezvous is not None
            assert [one["rank"] for one in outcome.rendezvous.facts] == list(range(size))


class Impostor:
    """Follows the protocol of a rank step by step, with a given secret."""

    def __init__(self, port: int, secret: bytes = b""):
        self.connection = connected(port)
        self._file = self.connection.makefile("rb")
        nonce = new_nonce()
        self.connection.sendall(protocol.encode("knock", nonce=nonce, protocol=protocol.PROTOCOL))
        challenge = self._file.readline().rstrip(b"\n")
        rank_0s = protocol.decode_nonce(protocol.decode(challenge.partition(b" ")[2]))
        self.session = Session(secret, nonce, rank_0s, CLIENT)
        self.trusts = True
        try:
            self.session.verified(challenge)
        except WrongSecret:
            self.trusts = False

    def say(self, message: bytes) -> None:
        self.connection.sendall(self.session.sign(message))

    def hears(self) -> dict[str, Any]:
        return protocol.decode(self.session.verified(self._file.readline().rstrip(b"\n")))

    def hears_nothing(self) -> bool:
        """Returns whether rank 0 closed the connection without a message."""
        try:
            return self._file.read() == b""
        except ConnectionError:
            return True

    def close(self) -> None:
        self._file.close()
        self.connection.close()


def connected(port: int) -> socket.socket:
    """Connects to rank 0's port once rank 0 listens."""
    deadline = time.monotonic() + LONG_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=LONG_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
