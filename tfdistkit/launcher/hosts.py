"""The hosts of a job, and how ssh reaches them: the values of `-H`, `--hostfile` and related options."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tfdistkit.cluster.addresses import LOOPBACK_HOSTS
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_integer, require_positive

# Rejects names that ssh could read as an option, or a shell as syntax. IPv6 addresses are in brackets.
_HOST = r"(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(%\w+)?\])"
_ENTRY = re.compile(rf"{_HOST}(:(?P<slots>\d{{1,6}}))?", re.ASCII)
# Open MPI's keywords for the number of processes; its `max_slots`, the limit for oversubscription, is ignored.
_SLOT_WORDS = ("slots", "cpu", "count")
_OTHER_WORDS = ("max_slots", "max-slots")

_EXPECTED = "HOST or HOST:SLOTS with 1 slot or more, such as node1:4, user@node1:4 or [fd00::1]:4"
_EXPECTED_LINE = "HOST slots=N with N of 1 or more, or HOST:N; a comment begins with #"

# Time limit of the preflight check of hosts, in seconds, unless `--start-timeout` sets another.
START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class HostsSpec:
    """The hosts of a job, and how to start processes on them.

    Args:
        slots: The hosts in order, each with its number of workers.
        python: The path of Python on the hosts.
        folder: The working directory of the script.
        interface: The network interface that the processes use on every host; None for that of the ssh connection.
        ssh_port: The port of sshd; None for the ssh configuration's.
        ssh_identity_file: A private key; None for the ssh configuration's.
        start_timeout_s: Time limit of the preflight check, in seconds.
    """

    slots: tuple[HostSlots, ...]
    python: str
    folder: str
    interface: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    start_timeout_s: float = START_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.ssh_port is not None:
            require_integer("--ssh-port", self.ssh_port, at_most=65535)
        if self.ssh_identity_file is not None and not Path(self.ssh_identity_file).is_file():
            what = "`--ssh-identity-file` must be the file of a private key."
            raise OptionError(explain(what, received=f"{self.ssh_identity_file}, which does not exist"))
        require_positive("--start-timeout", self.start_timeout_s, "seconds")

    @property
    def where(self) -> str:
        """The hosts in a sentence."""
        return ", ".join(one.host for one in self.slots)

    @property
    def fixed_slots(self) -> tuple[HostSlots, ...]:
        """The hosts of an elastic job whose hosts do not change, each with the most workers."""
        return self.slots

    @property
    def how_to_add_slots(self) -> str:
        """What the user can do if the slots are too few, as a sentence."""
        return "Give the hosts more slots: -H HOST:SLOTS."

    def limited_to(self, slots: Sequence[HostSlots], workers: int) -> HostsSpec:
        """Returns the same with the hosts of an attempt.

        Args:
            slots: The hosts with room, in order.
            workers: The number of workers.
        """
        used = set(spread(slots, workers))
        return replace(self, slots=tuple(one for index, one in enumerate(slots) if index in used))

    @property
    def total(self) -> int:
        """The total number of slots."""
        return sum(one.slots for one in self.slots)


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Parses the value of `-H`.

    Args:
        text: `node1:4,node2:4`; a host without a number has one slot; the slots of repeated hosts are added.

    Returns:
        The hosts in order.

    Raises:
        OptionError: if an entry is not a host.
    """
    return _merged(_parse_entry(entry, repr(text), _EXPECTED) for entry in text.split(","))


def read_hostfile(path: Path) -> tuple[HostSlots, ...]:
    """Reads a file with one host on each line, in the form of `horovodrun` or of Open MPI.

    Args:
        path: The file. Its lines: `node1 slots=4` or `node1:4`, also with `max_slots=8`; a host alone has one slot.

    Returns:
        The hosts in order; the slots of repeated hosts are added.

    Raises:
        OptionError: if the file cannot be read, or a line has another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        what = "`--hostfile` must be a readable text file."
        raise OptionError(explain(what, received=f"{path}: {error}")) from error
    numbered = ((number, line.partition("#")[0].split()) for number, line in enumerate(lines, start=1))
    hosts = _merged(_parse_line(words, f"line {number} of {path}") for number, words in numbered if words)
    if not hosts:
        what = "`--hostfile` must name at least one host."
        raise OptionError(explain(what, received=f"{path}, which names none", expected=_EXPECTED_LINE))
    return hosts


def is_this_machine(host: str) -> bool:
    """Returns whether a host name is this machine's; compares names, without a DNS lookup."""
    return host.lower() in LOOPBACK_HOSTS or host == socket.gethostname()


def spread(slots: Sequence[HostSlots], count: int) -> list[int]:
    """Assigns workers to hosts in order, filling each host before the next.

    Args:
        slots: The hosts.
        count: The number of workers.

    Returns:
        The host of each worker, as an index into `slots`.

    Raises:
        OptionError: if there are too few slots.
    """
    by_slot = [index for index, one in enumerate(slots) for _ in range(one.slots)]
    if count > len(by_slot):
        raise OptionError(
            explain(
                f"`-np` must be at most {len(by_slot)}, the number of slots.",
                received=f"-np {count}, and {len(by_slot)} slots on {', '.join(one.host for one in slots)}",
                do="Give the hosts more slots: -H HOST:SLOTS.",
            )
        )
    return by_slot[:count]


def _parse_entry(entry: str, received: str, expected: str) -> HostSlots:
    found = _ENTRY.fullmatch(entry.strip())
    if found is None or found["slots"] is not None and int(found["slots"]) < 1:
        raise OptionError(explain(f"{entry.strip()!r} is not a host.", received=received, expected=expected))
    return HostSlots((found["user"] or "") + found["name"].strip("[]"), int(found["slots"] or 1))


def _parse_line(words: Sequence[str], where: str) -> HostSlots:
    line = " ".join(words)
    host = _parse_entry(words[0], f"{line!r} in {where}", _EXPECTED_LINE)
    for word in words[1:]:
        name, _, value = word.partition("=")
        is_number = value.isascii() and value.isdecimal() and 1 <= len(value) <= 6 and int(value) > 0
        if name not in _SLOT_WORDS + _OTHER_WORDS or not is_number:
            what = f"{word!r} is not an option of a host."
            raise OptionError(explain(what, received=f"{line!r} in {where}", expected=_EXPECTED_LINE))
        if name in _SLOT_WORDS:
            host = HostSlots(host.host, int(value))
    return host


def _merged(hosts: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    slots: dict[str, int] = {}
    for one in hosts:
        slots[one.host] = slots.get(one.host, 0) + one.slots
    return tuple(HostSlots(host, count) for host, count in slots.items())
