"""Connects the ranks of one host, each with each, by Unix sockets, and hands each rank's memory to the others.

The sockets have names in Linux's abstract namespace, and the memory has none: no file is left behind, however the
processes end. A rank that dies closes its sockets, which its peers see at once.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdistkit.cluster.local_exchange import host_id
from tfdistkit.errors import RendezvousError, explain

_LOG = logging.getLogger(__name__)

# The name of a rank's place among the facts that ranks exchange before they start.
FACT = "shared_memory"

_HELLO = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid, of Linux's `struct ucred`.
_POLL_S = 0.2


class Listener:
    """Where the peers of this rank find it.

    Attributes:
        place: Where that is, for the facts of the rendezvous: the host, and the socket's name there.
    """

    def __init__(self) -> None:
        name = f"tfdistkit-{secrets.token_hex(16)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(f"\0{name}")
        self.socket.listen()
        self.place = f"{host_id():x} {name}"

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()


def listen() -> Listener | None:
    """Returns a listener for the peers on this host; None where ranks cannot share memory."""
    if not host_id() or not hasattr(os, "memfd_create"):
        return None
    try:
        os.close(os.memfd_create("tfdistkit"))
    except OSError as error:  # A container whose seccomp profile forbids it, or no descriptors.
        _LOG.warning("Ranks cannot share memory here, and communicate over TensorFlow: memfd_create: %s.", error)
        return None
    return Listener()


def ranks_of_hosts(facts: Sequence[Mapping[str, str | int]]) -> list[list[int]]:
    """Returns the ranks that can share memory, by what they told each other: a list for each host, in rank order.

    Args:
        facts: The facts of all ranks, in rank order; those with a listener have its place as `FACT`. A rank without
            one shares memory with no other.
    """
    hosts: dict[str, list[int]] = {}
    for rank, one in enumerate(facts):
        host = str(one.get(FACT, "")).rpartition(" ")[0]
        hosts.setdefault(host or f"without {rank}", []).append(rank)
    return list(hosts.values())


def connect(
    listener: Listener,
    rank: int,
    facts: Sequence[Mapping[str, str | int]],
    timeout_s: float,
    ranks: Sequence[int] | None = None,
) -> dict[int, socket.socket]:
    """Connects ranks of a host, each with each.

    Args:
        listener: This rank's; closed afterwards.
        rank: This rank.
        facts: The facts of all ranks, in rank order.
        timeout_s: Seconds to wait for them.
        ranks: The ranks to connect, in order, this one included. Default: all.

    Returns:
        A connected socket for each other rank, by its place in `ranks`.

    Raises:
        RendezvousError: if a rank does not come, and names it.
    """
    deadline = time.monotonic() + timeout_s
    ranks = range(len(facts)) if ranks is None else ranks
    own = ranks.index(rank)
    peers: dict[int, socket.socket] = {}
    try:
        for lower in range(own):
            name = str(facts[ranks[lower]][FACT]).rpartition(" ")[2]
            peers[lower] = _call(name, deadline)
            peers[lower].sendall(_HELLO.pack(own))
        while len(peers) < len(ranks) - 1:
            found, connection = _accept(listener.socket, deadline)
            peers[found] = connection
    except OSError as error:
        missing = [str(r) for i, r in enumerate(ranks) if r != rank and i not in peers]
        for connection in peers.values():
            connection.close()
        raise RendezvousError(
            explain(
                f"The ranks of this host could not connect over shared memory: rank {', '.join(missing)} is missing.",
                received=str(error) or type(error).__name__,
                do='Look at the logs of these ranks, or use tfdistkit.strategy("multiworker", communication="ring").',
            )
        ) from error
    finally:
        listener.close()
    return peers


def _call(name: str, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(max(_POLL_S, deadline - time.monotonic()))
    connection.connect(f"\0{name}")
    return connection


def _accept(listening: socket.socket, deadline: float) -> tuple[int, socket.socket]:
    """Returns the next rank that comes, and its connection; turns other users away."""
    while True:
        listening.settimeout(max(_POLL_S, deadline - time.monotonic()))
        connection, _ = listening.accept()
        if _credentials(connection)[1] == os.getuid():
            connection.settimeout(max(_POLL_S, deadline - time.monotonic()))
            hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
            if len(hello) == _HELLO.size:
                return _HELLO.unpack(hello)[0], connection
        connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError


def process_of(connection: socket.socket) -> int:
    """Returns the number of the process at the other end of a connection."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(given)
    return process, user, group


def share_memory(rank: int, peers: Mapping[int, socket.socket], nbytes: int) -> list[mmap.mmap]:
    """Maps a piece of memory of each rank: this one's to write and read, those of the others to read.

    Args:
        rank: This rank.
        peers: The connections to the others.
        nbytes: The size of each piece.

    Returns:
        The memory of all ranks, in rank order.
    """
    own = os.memfd_create("tfdistkit")
    received: dict[int, int] = {}
    try:
        os.ftruncate(own, nbytes)
        for connection in peers.values():
            socket.send_fds(connection, [b"m"], [own])
        for peer, connection in peers.items():
            received[peer] = _receive_descriptor(connection)
        memory: list[Any] = [None] * (len(peers) + 1)
        memory[rank] = mmap.mmap(own, nbytes)
        for peer, descriptor in received.items():
            memory[peer] = mmap.mmap(descriptor, nbytes, prot=mmap.PROT_READ)
        return memory
    finally:
        for descriptor in (own, *received.values()):
            os.close(descriptor)


def _receive_descriptor(connection: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise ConnectionError("a rank left before it shared its memory")
    return descriptors[0]
