"""Which hosts a job uses, and how they are reached: what `-H`, `--hostfile` and their like say."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdistkit.cluster.addresses import LOOPBACK_HOSTS
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import OptionError, explain

# A name that ssh could take for an option, or a shell for anything but a name, is none. An IPv6 address is in brackets.
_HOST = r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(%\w+)?\])"
_ENTRY = re.compile(rf"{_HOST}(:(?P<slots>\d{{1,6}}))?", re.ASCII)
# Open MPI's words for the number of processes; its `max_slots` allows more of them than there should be.
_SLOT_WORDS = ("slots", "cpu", "count")
_OTHER_WORDS = ("max_slots", "max-slots")

_EXPECTED = "HOST or HOST:SLOTS with 1 slot or more, such as node1:4, user@node1:4 or [fd00::1]:4"
_EXPECTED_LINE = "HOST slots=N with N of 1 or more, or HOST:N; a comment begins with #"


@dataclass(frozen=True)
class HostsSpec:
    """The hosts of a job, and how processes are started there.

    Args:
        slots: The hosts in their order, and how many workers each takes.
        python: The Python there, as a path.
        folder: The folder where the script runs.
        interface: The network interface that the processes use on every host; None: the one that ssh came by.
        ssh_port: The port of sshd; None: what ssh's own configuration says.
        ssh_identity_file: A private key; None: what ssh's own configuration says.
        start_timeout_s: How long the hosts may take until all is ready for the workers, in seconds.
    """

    slots: tuple[HostSlots, ...]
    python: str
    folder: str
    interface: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    start_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.ssh_port is not None and not 1 <= self.ssh_port <= 65535:
            raise OptionError(
                explain("`--ssh-port` is no port.", received=str(self.ssh_port), expected="a number from 1 to 65535")
            )
        if self.ssh_identity_file is not None and not Path(self.ssh_identity_file).is_file():
            raise OptionError(
                explain("`--ssh-identity-file` is not there.", received=self.ssh_identity_file, expected="a key's file")
            )
        if not self.start_timeout_s > 0:
            what = "`--start-timeout` is not a time."
            raise OptionError(explain(what, received=f"{self.start_timeout_s:g}", expected="seconds, more than 0"))

    @property
    def total(self) -> int:
        """How many workers they take together."""
        return sum(one.slots for one in self.slots)


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Reads what follows `-H`.

    Args:
        text: `node1:4,node2:4`; a host without a number has one slot; what is named twice has the slots of both.

    Returns:
        The hosts in their order.

    Raises:
        OptionError: if a part of it is none.
    """
    return _merged(_parse_entry(entry, repr(text), _EXPECTED) for entry in text.split(","))


def read_hostfile(path: Path) -> tuple[HostSlots, ...]:
    """Reads a file with one host on each line, in the form of `horovodrun` or of Open MPI.

    Args:
        path: The file. Its lines: `node1 slots=4` or `node1:4`, also with `max_slots=8`; a host alone has one slot.

    Returns:
        The hosts in their order; what is named twice has the slots of both.

    Raises:
        OptionError: if the file cannot be read, or a line of it is none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = "The file of hosts cannot be read."
        raise OptionError(explain(what, received=f"{path}: {error}", expected="a text file")) from error
    numbered = ((number, line.partition("#")[0].split()) for number, line in enumerate(lines, start=1))
    hosts = _merged(_parse_line(words, f"line {number} of {path}") for number, words in numbered if words)
    if not hosts:
        raise OptionError(explain("The file of hosts names none.", received=str(path), expected=_EXPECTED_LINE))
    return hosts


def is_this_machine(host: str) -> bool:
    """Whether a host is the one that the launcher runs on, by its name: it is not asked for."""
    return host.lower() in LOOPBACK_HOSTS or host == socket.gethostname()


def spread(slots: Sequence[HostSlots], count: int) -> list[int]:
    """Decides which host each worker runs on: the first one is filled first.

    Args:
        slots: The hosts.
        count: How many workers.

    Returns:
        The host of each worker, by its place in `slots`.

    Raises:
        OptionError: if there are too few slots.
    """
    places = [place for place, one in enumerate(slots) for _ in range(one.slots)]
    if count > len(places):
        raise OptionError(
            explain(
                "There are more workers than slots.",
                received=f"-np {count}, and {len(places)} slots on {', '.join(one.host for one in slots)}",
                expected=f"at most {len(places)} workers",
                do="Give the hosts more slots: -H HOST:SLOTS.",
            )
        )
    return places[:count]


def _parse_entry(entry: str, received: str, expected: str) -> HostSlots:
    found = _ENTRY.fullmatch(entry.strip())
    if found is None or found["slots"] is not None and int(found["slots"]) < 1:
        raise OptionError(explain(f"{entry.strip()!r} is no host.", received=received, expected=expected))
    return HostSlots((found["user"] or "") + found["name"].strip("[]"), int(found["slots"] or 1))


def _parse_line(words: Sequence[str], where: str) -> HostSlots:
    line = " ".join(words)
    host = _parse_entry(words[0], f"{line!r} in {where}", _EXPECTED_LINE)
    for word in words[1:]:
        name, _, value = word.partition("=")
        is_number = value.isascii() and value.isdecimal() and 1 <= len(value) <= 6 and int(value) > 0
        if name not in _SLOT_WORDS + _OTHER_WORDS or not is_number:
            what = f"{word!r} says nothing about a host."
            raise OptionError(explain(what, received=f"{line!r} in {where}", expected=_EXPECTED_LINE))
        if name in _SLOT_WORDS:
            host = HostSlots(host.host, int(value))
    return host


def _merged(hosts: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    slots: dict[str, int] = {}
    for one in hosts:
        slots[one.host] = slots.get(one.host, 0) + one.slots
    return tuple(HostSlots(host, count) for host, count in slots.items())
