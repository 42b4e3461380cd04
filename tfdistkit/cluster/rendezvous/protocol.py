"""Encodes and decodes the messages of a rendezvous: one line of JSON per message, bounded in size.

```
client -> server  knock      a nonce
server -> client  challenge  another nonce         from here on signed with the job's secret (`secret`)
client -> server  hello      rank, its list of addresses, its facts
server -> client  welcome    tells a waiting rank 0 from a port that never answers
server -> client  ready?     all ranks have joined; does this one still answer?
client -> server  ready
server -> client  result     the facts of all ranks      or, at any time,  error  the same message for all ranks
```

Rank 0 proves first that it knows the secret, so another process at its address learns nothing. Every field from the
network is checked and bounded; none is executed or unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Marks messages of this protocol, and its version.
MAGIC = "tfdistkit-meeting"
PROTOCOL = 2
# Bytes. A hello holds the addresses of all workers: some thousands of them fit.
LONGEST_HELLO_BYTES = 256 * 1024
# Bounds of valid messages: a timeout of about 30 years; process ids, seeds and ports; the names of hosts (RFC 1035
# allows 253 characters) and versions.
LONGEST_WAIT_S = 1e9
_LARGEST_NUMBER = 2**63
_LONGEST_TEXT = 1024
_MOST_FACTS = 64
_LONGEST_NONCE = 64

Facts = Mapping[str, "str | int"]


class NotOurs(ValueError):
    """A line is not a message of this protocol."""


@dataclass(frozen=True)
class Hello:
    """Introduces a process to rank 0.

    Args:
        rank: The rank of the process.
        addresses: Its list of the training processes, in rank order.
        facts: Its facts for its peers: versions, a proposal for a seed.
        host: The name of its machine.
        pid: Its process id.
        token: Tells a process that reconnects from another one with the same rank.
        remaining_s: The seconds until its timeout.
        protocol: `PROTOCOL` of its tfdistkit.
    """

    rank: int
    addresses: tuple[str, ...]
    facts: Facts
    host: str
    pid: int
    token: str
    remaining_s: float
    protocol: int = PROTOCOL


def encode(kind: str, **fields: Any) -> bytes:
    """Returns a message as a line of JSON."""
    return json.dumps({"magic": MAGIC, "kind": kind, **fields}).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Returns the fields of a message.

    Raises:
        NotOurs: if the line is not a message of this protocol.
    """
    try:
        message = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise NotOurs(shown(line)) from None
    if not isinstance(message, dict) or message.get("magic") != MAGIC or not isinstance(message.get("kind"), str):
        raise NotOurs(shown(line))
    return message


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number (RFC 8259)")


def decode_nonce(message: Mapping[str, Any]) -> str:
    """Returns the nonce in a knock or a challenge.

    Raises:
        NotOurs: if it has no valid nonce.
    """
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not 0 < len(nonce) <= _LONGEST_NONCE:
        raise NotOurs(f"{message['kind']!r} without a nonce")
    return nonce


def encode_hello(hello: Hello) -> bytes:
    """Returns a hello as a line of JSON."""
    return encode("hello", **asdict(hello))


def decode_hello(line: bytes) -> Hello:
    """Returns the hello in a line.

    Raises:
        NotOurs: if the line is not a hello.
    """
    message = decode(line)
    numbers = [message.get(name) for name in ("rank", "pid", "protocol")]
    remaining_s = message.get("remaining_s")
    texts = [message.get(name) for name in ("host", "token")]
    addresses = message.get("addresses")
    well_formed = (
        message["kind"] == "hello"
        and all(_is_number(number, 0) for number in numbers)
        and all(_is_text(text) for text in texts)
        and isinstance(addresses, list)
        and all(_is_text(address) for address in addresses)
        and isinstance(remaining_s, int | float)
        and 0 <= remaining_s <= LONGEST_WAIT_S
        and are_facts(message.get("facts"))
    )
    if not well_formed:
        raise NotOurs(shown(line))
    names = ("rank", "facts", "host", "pid", "token", "remaining_s", "protocol")
    return Hello(addresses=tuple(message["addresses"]), **{name: message[name] for name in names})


def are_facts(value: Any) -> bool:
    """Returns whether a value has the form of facts: a few names with text or integers (64 bits)."""
    if not isinstance(value, dict) or len(value) > _MOST_FACTS:
        return False
    return all(_is_text(name) and (_is_text(fact) or _is_number(fact)) for name, fact in value.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _is_number(value: Any, least: int = -_LARGEST_NUMBER) -> bool:
    return type(value) is int and least <= value < _LARGEST_NUMBER


def printable(text: str) -> str:
    """Escapes a peer's text for a message: control characters are replaced, except line ends."""
    return "".join(one if one == "\n" or one.isprintable() else ascii(one)[1:-1] for one in text)


def shown(line: bytes) -> str:
    """Returns the beginning of a line for a message."""
    return repr(line[:60] + (b"..." if len(line) > 60 else b""))


def close_abruptly(connection: socket.socket) -> None:
    """Closes a connection with a reset, so that this end's port is not kept in TIME_WAIT."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # the other end has closed already
    connection.close()
