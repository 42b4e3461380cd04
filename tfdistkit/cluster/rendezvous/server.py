"""Runs rank 0's side of a rendezvous: waits for its peers, and sends the result or the error to all of them."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time

from tfdistkit import env
from tfdistkit.cluster import ports
from tfdistkit.cluster.addresses import is_on_loopback, split_address
from tfdistkit.cluster.own_address import taken_port_error
from tfdistkit.cluster.rendezvous import protocol as wire
from tfdistkit.cluster.rendezvous import validation as checks
from tfdistkit.cluster.rendezvous.connection import PeerConnection
from tfdistkit.cluster.rendezvous.secret import job_secret
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, RendezvousError

_log = logging.getLogger("tfdistkit.cluster")

# Timeout in seconds for the hello of a new connection.
_HELLO_S = 5.0
# Most open connections without a hello; the oldest is closed beyond that.
_MOST_UNIDENTIFIED = 64
# Seconds to keep listening after an error, so that ranks that join late get the message.
_LATE_COMERS_S = 10.0
# Timeout in seconds for peers to read the result and close their end.
_CLOSE_S = 2.0
# Most rejected connections that an error names.
_MOST_REJECTED = 5
_FIRST_NOTE_S = 10.0
_NEXT_NOTE_S = 30.0


class Server:
    """Runs rank 0's side of a rendezvous.

    Args:
        spec: The cluster.
        hello: The hello of rank 0.
        deadline: The deadline, on the clock of `time.monotonic`.
    """

    def __init__(self, spec: ClusterSpec, hello: wire.Hello, deadline: float):
        self._spec = spec
        self._hello = hello
        self._peer_ranks = range(1, spec.world_size)
        # Seconds before the earliest deadline of all ranks, so that the message still reaches them.
        self._margin_s = min(1.0, 0.1 * hello.remaining_s)
        self._deadline = deadline - self._margin_s
        self._start = time.monotonic()
        self._next_note = self._start + _FIRST_NOTE_S
        self._selector = selectors.DefaultSelector()
        self._secret = job_secret()
        self._peers: list[PeerConnection] = []
        self._joined: dict[int, PeerConnection] = {}
        self._rejected: dict[tuple[str, str], str] = {}
        self._failure: ClusterConfigError | RendezvousError | None = None
        self._notified: set[int] = set()

    def run(self) -> tuple[wire.Facts, ...]:
        """Returns the facts of all ranks.

        Raises:
            RendezvousError: if a rank is missing at the deadline.
            ClusterConfigError: if the processes contradict each other, or the port is taken.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._selector.close)
            for listener in self._listen():
                stack.callback(listener.close)
                self._selector.register(listener, selectors.EVENT_READ)
            stack.callback(self._drop_all)
            self._gather()
            if self._failure is None:
                self._send_to_joined(wire.encode("result", facts=self._all_facts()))
            self._wait_for_closes()
            if self._failure is not None:
                raise self._failure
            return tuple(self._all_facts())

    def _all_facts(self) -> list[wire.Facts]:
        hellos = [self._hello, *(self._joined[rank].hello for rank in self._peer_ranks)]
        return [hello.facts for hello in hellos if hello is not None]

    def _listen(self) -> list[socket.socket]:
        """Listens on all interfaces, as TensorFlow's server does: rank 0's name may resolve to no local address.

        If all ranks are on this machine, listens on loopback only.
        """
        host, port = split_address(self._spec.workers[0])
        is_local = is_on_loopback(self._spec.workers)
        try:
            listeners = ports.bind_loopback(host, port) if is_local else ports.bind("", port)
            for listener in listeners:
                listener.listen(self._spec.world_size + _MOST_UNIDENTIFIED)
                listener.setblocking(False)
        except OSError:
            raise taken_port_error(self._spec, port) from None
        return listeners

    def _gather(self) -> None:
        """Runs until all ranks have joined and answer, or until all have received an error."""
        while not self._is_over():
            for key, _ in self._selector.select(timeout=self._pause_s()):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.data.is_open:  # not closed by an earlier event of this round
                    self._read(key.data)
            self._drop_silent_peers()
            self._ask_if_ready()
            self._log_missing()

    def _is_over(self) -> bool:
        if self._failure is not None and self._notified.issuperset(self._peer_ranks):
            return True
        if self._failure is None and not self._missing() and all(one.is_ready for one in self._joined.values()):
            return True
        if time.monotonic() < self._deadline:
            return False
        if self._failure is None:
            waited_s = time.monotonic() - self._start
            self._fail(
                checks.missing_error(
                    self._spec, self._missing(), self._unresponsive(), waited_s, [*self._rejected.values()]
                )
            )
        return True

    def _missing(self) -> list[int]:
        return [rank for rank in self._peer_ranks if rank not in self._joined]

    def _unresponsive(self) -> list[int]:
        return [rank for rank, peer in self._joined.items() if peer.was_asked and not peer.is_ready]

    def _pause_s(self) -> float:
        return max(0.0, min(1.0, self._deadline - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        try:
            peer = PeerConnection(*listener.accept())
        except OSError:
            return  # it has closed already
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._peers.append(peer)
        unidentified = self._unidentified()
        if len(unidentified) > _MOST_UNIDENTIFIED:
            self._reject(unidentified[0], "nothing, with too many open connections")

    def _unidentified(self) -> list[PeerConnection]:
        return [peer for peer in self._peers if peer.hello is None]

    def _read(self, peer: PeerConnection) -> None:
        try:
            for line in peer.lines():
                if peer.session is None:
                    self._answer_knock(peer, line)
                elif peer.hello is None:
                    self._welcome(peer, wire.decode_hello(peer.session.verified(line)))
                elif wire.decode(peer.session.verified(line))["kind"] == "ready" and peer.was_asked:
                    peer.is_ready = True
        except wire.NotOurs as other:
            self._reject(peer, str(other))
        except OSError:
            if peer.session is not None and peer.hello is None:
                self._reject(peer, f"no hello after the challenge: does it have another {env.SECRET}?")
            else:
                self._drop(peer)

    def _answer_knock(self, peer: PeerConnection, line: bytes) -> None:
        message = wire.decode(line)
        version = message.get("protocol")
        if message["kind"] not in ("knock", "hello") or type(version) is not int:
            raise wire.NotOurs(wire.shown(line))
        if version != wire.PROTOCOL:
            failure = checks.other_protocol(self._hello, peer.address)
            self._send(peer, _announcement(failure))
            if not self._secret:  # with a secret, unauthenticated peers must not end the job
                self._fail(failure)
            raise wire.NotOurs("a message of another version of tfdistkit")
        if not peer.challenge(self._secret, wire.decode_nonce(message)):
            self._drop(peer)

    def _welcome(self, peer: PeerConnection, hello: wire.Hello) -> None:
        earlier = self._joined.get(hello.rank)
        if earlier is not None and earlier.hello is not None:
            if earlier.is_gone() or earlier.hello.token == hello.token:  # it exited, or reconnects
                self._drop(earlier)
                earlier = None
        peer.hello = hello
        self._deadline = min(self._deadline, time.monotonic() + hello.remaining_s - self._margin_s)
        if self._failure is not None:
            self._notified.add(hello.rank)
            self._send(peer, _announcement(self._failure))
            return
        contradiction = checks.contradiction(self._hello, hello, earlier.hello if earlier else None)
        if contradiction is not None:
            self._notified.add(hello.rank)
            self._send(peer, _announcement(contradiction))
            self._fail(contradiction)
            return
        self._joined[hello.rank] = peer
        self._send(peer, wire.encode("welcome"))

    def _ask_if_ready(self) -> None:
        """Asks all ranks, once they have joined, whether they still answer: a stopped one would hang the training."""
        if self._failure is not None or self._missing():
            return
        difference = checks.version_difference(self._all_facts())
        if difference is not None:
            self._fail(difference)
            return
        for peer in list(self._joined.values()):
            if not peer.was_asked:
                peer.was_asked = True
                self._send(peer, wire.encode("ready?"))

    def _fail(self, failure: ClusterConfigError | RendezvousError) -> None:
        self._failure = failure
        self._deadline = min(self._deadline, time.monotonic() + _LATE_COMERS_S)
        self._notified.update(self._joined)
        self._send_to_joined(_announcement(failure))

    def _log_missing(self) -> None:
        now = time.monotonic()
        absent = sorted([*self._missing(), *self._unresponsive()])
        if now < self._next_note or self._failure is not None or not absent:
            return
        self._next_note = now + _NEXT_NOTE_S
        names = checks.name_ranks(self._spec, absent)
        _log.warning(
            "Waiting for %s for %.0f s; %.0f s until the timeout.", names, now - self._start, self._deadline - now
        )

    def _drop_silent_peers(self) -> None:
        for peer in self._unidentified():
            if time.monotonic() - peer.opened_at > _HELLO_S:
                self._reject(peer, peer.unread)

    def _reject(self, peer: PeerConnection, sent: str) -> None:
        """Closes a connection that does not belong to the job, and records it for the message at the deadline."""
        if len(self._rejected) < _MOST_REJECTED:
            self._rejected.setdefault((peer.ip, sent), f"{peer.address} sent {sent}")
        self._drop(peer)

    def _drop(self, peer: PeerConnection) -> None:
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        self._selector.unregister(peer.socket)
        wire.close_abruptly(peer.socket)
        if peer.hello is not None and self._joined.get(peer.hello.rank) is peer:
            del self._joined[peer.hello.rank]

    def _drop_all(self) -> None:
        for peer in list(self._peers):
            self._drop(peer)

    def _send(self, peer: PeerConnection, message: bytes) -> None:
        if not peer.send(message):
            self._drop(peer)

    def _send_to_joined(self, message: bytes) -> None:
        for peer in self._joined.copy().values():
            peer.send(message)

    def _wait_for_closes(self) -> None:
        """Waits for peers to close first: the end that closes first keeps the port in TIME_WAIT for a minute."""
        until = time.monotonic() + _CLOSE_S
        for peer in self._peers:
            if peer.hello is not None:
                peer.wait_for_close(until)


def _announcement(failure: ClusterConfigError | RendezvousError) -> bytes:
    return wire.encode("error", type=type(failure).__name__, message=str(failure))
