"""What the processes of a meeting say to each other: one line of JSON per message, bounded in size.

```
guest -> host   hello    rank, its view of the cluster, its facts
host  -> guest  welcome  (so that a silent port is told apart from a patient one)
host  -> guest  ready?   everybody is here; who is still awake?
guest -> host   ready
host  -> guest  result   the facts of all ranks      or, at any time,  error  the message for everybody
```

Whatever comes from the network is checked field by field; nothing of it is ever executed or unpickled.
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
PROTOCOL = 1
# A hello holds the addresses of all workers: some thousands of them fit.
LONGEST_HELLO_BYTES = 256 * 1024

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
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise NotOurs(shown(line)) from None
    if not isinstance(message, dict) or message.get("magic") != MAGIC or not isinstance(message.get("kind"), str):
        raise NotOurs(shown(line))
    return message


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
    texts = [message.get(name) for name in ("host", "token")]
    addresses = message.get("addresses")
    remaining_s = message.get("remaining_s")
    well_formed = (
        message["kind"] == "hello"
        and all(type(number) is int for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and isinstance(addresses, list)
        and all(isinstance(address, str) for address in addresses)
        and type(remaining_s) in (int, float)
        and are_facts(message.get("facts"))
    )
    if not well_formed:
        raise NotOurs(shown(line))
    names = ("rank", "facts", "host", "pid", "token", "remaining_s", "protocol")
    return Hello(addresses=tuple(message["addresses"]), **{name: message[name] for name in names})


def are_facts(value: Any) -> bool:
    """Whether a value has the form of one rank's facts: names to texts or whole numbers."""
    if not isinstance(value, dict):
        return False
    return all(isinstance(name, str) and type(fact) in (str, int) for name, fact in value.items())


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
