"""What the processes of a rendezvous say to each other: one line of JSON per message, bounded in size.

```
guest -> host   knock      a random number
host  -> guest  challenge  another one           from here on signed with the job's secret (`secret`)
guest -> host   hello      rank, its view of the cluster, its facts
host  -> guest  welcome    (so that a silent port is told apart from a patient one)
host  -> guest  ready?     everybody is here; who is still awake?
guest -> host   ready
host  -> guest  result     the facts of all ranks      or, at any time,  error  the message for everybody
```

Rank 0 proves first that it knows the secret: whoever else listens at its address learns nothing. Whatever comes from
the network is checked field by field and bounded; nothing of it is ever executed or unpickled.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Marks our messages; the number changes when they do.
MAGIC = "tfdistkit-meeting"
PROTOCOL = 2
# A hello holds the addresses of all workers: some thousands of them fit.
LONGEST_HELLO_BYTES = 256 * 1024
# Nothing that our processes say is larger: about 30 years; process ids, seeds and ports; the names of hosts (RFC 1035
# allows 253 characters) and versions.
LONGEST_WAIT_S = 1e9
_LARGEST_NUMBER = 2**63
_LONGEST_TEXT = 1024
_MOST_FACTS = 64
_LONGEST_NONCE = 64

Facts = Mapping[str, "str | int"]


class NotOurs(ValueError):
    """A line that no process of tfdistkit has sent."""


@dataclass(frozen=True)
class Hello:
    """What a process says when it comes.

    Args:
        rank: Its rank.
        addresses: Its view of the training processes, in rank order.
        facts: What it wants the others to know: versions, a proposal for a seed.
        host: The name of its machine.
        pid: Its process id.
        token: Tells a process that comes back from another one with the same rank.
        remaining_s: After how many seconds it will stop waiting.
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
        NotOurs: if the line is not one of our messages.
    """
    try:
        message = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise NotOurs(shown(line)) from None
    if not isinstance(message, dict) or message.get("magic") != MAGIC or not isinstance(message.get("kind"), str):
        raise NotOurs(shown(line))
    return message


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON's (RFC 8259)")


def decode_nonce(message: Mapping[str, Any]) -> str:
    """Returns the random number in a knock or a challenge.

    Raises:
        NotOurs: if there is none.
    """
    nonce = message.get("nonce")
    if not isinstance(nonce, str) or not 0 < len(nonce) <= _LONGEST_NONCE:
        raise NotOurs(f"{message['kind']!r} without a random number")
    return nonce


def encode_hello(hello: Hello) -> bytes:
    """Returns a hello as a line of JSON."""
    return encode("hello", **asdict(hello))


def decode_hello(line: bytes) -> Hello:
    """Returns the hello in a line.

    Raises:
        NotOurs: if the line is something else.
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
    """Whether a value has the form of one rank's facts: a few names with texts or whole numbers (64 bits)."""
    if not isinstance(value, dict) or len(value) > _MOST_FACTS:
        return False
    return all(_is_text(name) and (_is_text(fact) or _is_number(fact)) for name, fact in value.items())


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _is_number(value: Any, least: int = -_LARGEST_NUMBER) -> bool:
    return type(value) is int and least <= value < _LARGEST_NUMBER


def printable(text: str) -> str:
    """Returns a peer's text for a message: what a terminal would obey is shown as its code, line ends are kept."""
    return "".join(one if one == "\n" or one.isprintable() else ascii(one)[1:-1] for one in text)


def shown(line: bytes) -> str:
    """Returns the beginning of a line for a message."""
    return repr(line[:60] + (b"..." if len(line) > 60 else b""))


def close_abruptly(connection: socket.socket) -> None:
    """Closes a connection with a reset, so that no TIME_WAIT stays with this end's port."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # the other end was faster
    connection.close()
