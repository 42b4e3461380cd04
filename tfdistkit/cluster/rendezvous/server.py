"""Rank 0 in a rendezvous: waits for all the others at its own address, and tells everybody the outcome."""

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
from tfdistkit.cluster.rendezvous.connection import Visitor
from tfdistkit.cluster.rendezvous.secret import job_secret
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, RendezvousError

_log = logging.getLogger("tfdistkit.cluster")

# A connection that says nothing for so long is a stranger's.
_HELLO_S = 5.0
# So many connections may be open without having said who they are; then the oldest goes.
_MOST_STRANGERS = 64
# A contradiction is told at once to those who are here; late-comers hear it if they come within this time.
_LATE_COMERS_S = 10.0
# How long the others may take to hear the outcome and close their end.
_FAREWELL_S = 2.0
# So many different strangers are named.
_MOST_INTRUDERS = 5
_FIRST_NOTE_S = 10.0
_NEXT_NOTE_S = 30.0


class Host:
    """Rank 0's side of a rendezvous.

    Args:
        spec: The cluster.
        hello: What rank 0 itself says.
        deadline: When to give up, on the clock of `time.monotonic`.
    """

    def __init__(self, spec: ClusterSpec, hello: wire.Hello, deadline: float):
        self._spec = spec
        self._hello = hello
        self._others = range(1, spec.world_size)
        # A little before the earliest deadline of anybody, so that the outcome still reaches them.
        self._margin_s = min(1.0, 0.1 * hello.remaining_s)
        self._deadline = deadline - self._margin_s
        self._start = time.monotonic()
        self._next_note = self._start + _FIRST_NOTE_S
        self._selector = selectors.DefaultSelector()
        self._secret = job_secret()
        self._visitors: list[Visitor] = []
        self._guests: dict[int, Visitor] = {}
        self._intruders: dict[tuple[str, str], str] = {}
        self._failure: ClusterConfigError | RendezvousError | None = None
        self._told: set[int] = set()

    def run(self) -> tuple[wire.Facts, ...]:
        """Returns the facts of all ranks.

        Raises:
            RendezvousError: if somebody is missing at the deadline.
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
                self._tell_guests(wire.encode("result", facts=self._all_facts()))
            self._farewell()
            if self._failure is not None:
                raise self._failure
            return tuple(self._all_facts())

    def _all_facts(self) -> list[wire.Facts]:
        hellos = [self._hello, *(self._guests[rank].hello for rank in self._others)]
        return [hello.facts for hello in hellos if hello is not None]

    def _listen(self) -> list[socket.socket]:
        """On all interfaces, as TensorFlow's server: the name that others use may stand for no local address.

        Where all ranks are on this machine, nobody else can reach the rendezvous.
        """
        host, port = split_address(self._spec.workers[0])
        is_local = is_on_loopback(self._spec.workers)
        try:
            listeners = ports.bind_loopback(host, port) if is_local else ports.bind("", port)
            for listener in listeners:
                listener.listen(self._spec.world_size + _MOST_STRANGERS)
                listener.setblocking(False)
        except OSError:
            raise taken_port_error(self._spec, port) from None
        return listeners

    def _gather(self) -> None:
        """Runs until everybody is there and awake, or until a failure has been told."""
        while not self._is_over():
            for key, _ in self._selector.select(timeout=self._pause_s()):
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif key.data.is_open:  # not closed by what came before it in this round
                    self._read(key.data)
            self._drop_silent_strangers()
            self._ask_if_ready()
            self._note_missing()

    def _is_over(self) -> bool:
        if self._failure is not None and self._told.issuperset(self._others):
            return True
        if self._failure is None and not self._missing() and all(one.ready for one in self._guests.values()):
            return True
        if time.monotonic() < self._deadline:
            return False
        if self._failure is None:
            waited_s = time.monotonic() - self._start
            self._fail(
                checks.missing_error(self._spec, self._missing(), self._asleep(), waited_s, [*self._intruders.values()])
            )
        return True

    def _missing(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._guests]

    def _asleep(self) -> list[int]:
        return [rank for rank, guest in self._guests.items() if guest.asked and not guest.ready]

    def _pause_s(self) -> float:
        return max(0.0, min(1.0, self._deadline - time.monotonic()))

    def _accept(self, listener: socket.socket) -> None:
        try:
            visitor = Visitor(*listener.accept())
        except OSError:
            return  # it went away again
        self._selector.register(visitor.connection, selectors.EVENT_READ, visitor)
        self._visitors.append(visitor)
        strangers = self._strangers()
        if len(strangers) > _MOST_STRANGERS:
            self._turn_away(strangers[0], "nothing, as many others")

    def _strangers(self) -> list[Visitor]:
        return [visitor for visitor in self._visitors if visitor.hello is None]

    def _read(self, visitor: Visitor) -> None:
        try:
            for line in visitor.lines():
                if visitor.session is None:
                    self._answer_knock(visitor, line)
                elif visitor.hello is None:
                    self._welcome(visitor, wire.decode_hello(visitor.session.verified(line)))
                elif wire.decode(visitor.session.verified(line))["kind"] == "ready" and visitor.asked:
                    visitor.ready = True
        except wire.NotOurs as other:
            self._turn_away(visitor, str(other))
        except OSError:
            if visitor.session is not None and visitor.hello is None:
                self._turn_away(visitor, f"no hello once it was here: has it another {env.SECRET}?")
            else:
                self._drop(visitor)

    def _answer_knock(self, visitor: Visitor, line: bytes) -> None:
        message = wire.decode(line)
        version = message.get("protocol")
        if message["kind"] not in ("knock", "hello") or type(version) is not int:
            raise wire.NotOurs(wire.shown(line))
        if version != wire.PROTOCOL:
            failure = checks.other_protocol(self._hello, visitor.peer)
            self._send(visitor, _announcement(failure))
            if not self._secret:  # otherwise anybody could end the job with it
                self._fail(failure)
            raise wire.NotOurs("a message of another version of tfdistkit")
        if not visitor.challenge(self._secret, wire.decode_nonce(message)):
            self._drop(visitor)

    def _welcome(self, visitor: Visitor, hello: wire.Hello) -> None:
        earlier = self._guests.get(hello.rank)
        if earlier is not None and earlier.hello is not None:
            if earlier.is_gone() or earlier.hello.token == hello.token:  # ended, or this one coming back
                self._drop(earlier)
                earlier = None
        visitor.hello = hello
        self._deadline = min(self._deadline, time.monotonic() + hello.remaining_s - self._margin_s)
        if self._failure is not None:
            self._told.add(hello.rank)
            self._send(visitor, _announcement(self._failure))
            return
        contradiction = checks.contradiction(self._hello, hello, earlier.hello if earlier else None)
        if contradiction is not None:
            self._told.add(hello.rank)
            self._send(visitor, _announcement(contradiction))
            self._fail(contradiction)
            return
        self._guests[hello.rank] = visitor
        self._send(visitor, wire.encode("welcome"))

    def _ask_if_ready(self) -> None:
        """Once everybody is here: are all still awake? One that is stopped or dead would hang the training."""
        if self._failure is not None or self._missing():
            return
        difference = checks.version_difference(self._all_facts())
        if difference is not None:
            self._fail(difference)
            return
        for guest in list(self._guests.values()):
            if not guest.asked:
                guest.asked = True
                self._send(guest, wire.encode("ready?"))

    def _fail(self, failure: ClusterConfigError | RendezvousError) -> None:
        self._failure = failure
        self._deadline = min(self._deadline, time.monotonic() + _LATE_COMERS_S)
        self._told.update(self._guests)
        self._tell_guests(_announcement(failure))

    def _note_missing(self) -> None:
        now = time.monotonic()
        absent = sorted([*self._missing(), *self._asleep()])
        if now < self._next_note or self._failure is not None or not absent:
            return
        self._next_note = now + _NEXT_NOTE_S
        who = checks.name_ranks(self._spec, absent)
        _log.warning("Waiting for %s since %.0f s; %.0f s left.", who, now - self._start, self._deadline - now)

    def _drop_silent_strangers(self) -> None:
        for visitor in self._strangers():
            if time.monotonic() - visitor.since > _HELLO_S:
                self._turn_away(visitor, visitor.said)

    def _turn_away(self, visitor: Visitor, said: str) -> None:
        """Ends a connection that is none of ours, and remembers it for the message at the deadline."""
        if len(self._intruders) < _MOST_INTRUDERS:
            self._intruders.setdefault((visitor.ip, said), f"{visitor.peer} said {said}")
        self._drop(visitor)

    def _drop(self, visitor: Visitor) -> None:
        if visitor not in self._visitors:
            return
        self._visitors.remove(visitor)
        self._selector.unregister(visitor.connection)
        wire.close_abruptly(visitor.connection)
        if visitor.hello is not None and self._guests.get(visitor.hello.rank) is visitor:
            del self._guests[visitor.hello.rank]

    def _drop_all(self) -> None:
        for visitor in list(self._visitors):
            self._drop(visitor)

    def _send(self, visitor: Visitor, message: bytes) -> None:
        if not visitor.send(message):
            self._drop(visitor)

    def _tell_guests(self, message: bytes) -> None:
        for guest in self._guests.copy().values():
            guest.send(message)

    def _farewell(self) -> None:
        """Lets the others close first: the end that closes first keeps the port in TIME_WAIT for a minute."""
        until = time.monotonic() + _FAREWELL_S
        for visitor in self._visitors:
            if visitor.hello is not None:
                visitor.wait_for_end(until)


def _announcement(failure: ClusterConfigError | RendezvousError) -> bytes:
    return wire.encode("error", type=type(failure).__name__, message=str(failure))
