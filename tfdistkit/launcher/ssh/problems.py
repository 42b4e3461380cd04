"""What can be wrong with a host, in a sentence, and what mends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdistkit.errors import UnsupportedError
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.ssh.connection import Connection, Question

if TYPE_CHECKING:
    from tfdistkit.launcher.ssh.preflight_report import HostReport

# What ssh says, and what to do.
_OF_SSH = (
    ("Could not resolve hostname", "Correct the name, or give it an address in the DNS, /etc/hosts or ~/.ssh/config."),
    ("Host key verification failed", "Look at its key once, and accept it: ssh {host} true"),
    ("Permission denied", "Let your key in there: ssh-copy-id {host}. Or name the key: --ssh-identity-file FILE."),
    ("Connection refused", "Start sshd there, or say where it listens: --ssh-port PORT."),
    ("timed out", "Look whether it is on, and whether a firewall is in between."),
    ("No route to host", "Look whether it is on, and at the network in between."),
    ("not found", "Say where Python is there: --python PATH."),
    ("No such file or directory", "Say where Python is there: --python PATH."),
    ("tfdistkit needs Python", "Say where a newer one is there: --python PATH."),
    ("Unknown option: -", "Say where a newer Python is there: --python PATH."),
)
_COPY = "Copy it to the same place on the host, or use a folder that all hosts share."
_NAMES = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras", "horovod": "Horovod"}


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a host.

    Args:
        text: What, in a sentence.
        do: What mends it.
    """

    text: str
    do: str

    def __str__(self) -> str:
        return f"{self.text} {self.do}".strip()


class HostsNotReady(UnsupportedError):
    """Hosts cannot take part in a job.

    Args:
        table: One line for each host.
        problems: Host -> what is wrong with it.
        count: How many hosts there are.
    """

    def __init__(self, table: str, problems: Mapping[str, Sequence[Problem]], count: int):
        self.table, self.problems = table, problems
        headline = f"{len(problems)} of {count} hosts cannot take part, so nothing was started: {', '.join(problems)}."
        lines = [f"{host}: {problem}" for host, listed in problems.items() for problem in listed]
        super().__init__("\n".join([headline, table, *lines]))


def of_connection(connection: Connection) -> Problem:
    """Returns why there is no connection, in ssh's words."""
    assert connection.loss is not None
    text = connection.loss.text
    do = next((do for words, do in _OF_SSH if words in text), "Try by hand what it says: ssh {host} true")
    return Problem(text, do.format(host=connection.host))


def silent(connection: Connection, timeout_s: float) -> Problem:
    """Returns that a host did not answer."""
    where = "the check" if connection.is_up else f"ssh {connection.host}"
    return Problem(
        f"It did not answer within {timeout_s:g} s ({where}).",
        "Look whether it is on and not overloaded; --start-timeout SECONDS waits longer.",
    )


def of_answer(question: Question, hosts: HostsSpec) -> Problem:
    """Returns why an agent could not answer."""
    if question.kind in ("FileNotFoundError", "NotADirectoryError"):
        do = "Make it there, use a folder that all hosts share, or name another one: --working-dir DIR."
        return Problem(f"The folder {hosts.folder} is not there.", do)
    return Problem(f"{question.error}.", "")


def no_ports(question: Question) -> Problem:
    """Returns that there are too few free ports."""
    return Problem(f"It has no free ports: {question.error}", "Look at what holds them: ss -ltnp")


def no_interface(name: str, interfaces: Mapping[str, str]) -> Problem:
    """Returns that the interface that was asked for has no address."""
    do = f"Choose one of them: --network-interface {_listed(interfaces)}"
    return Problem(f"It has no interface {name!r} with an address.", do)


def no_address(interfaces: Mapping[str, str]) -> Problem:
    """Returns that nobody knows where the others reach a host."""
    do = f"Choose an interface: --network-interface {_listed(interfaces)}"
    return Problem("It is not known where the others reach it.", do)


def no_way(host: str, address: str, why: str, interfaces: Mapping[str, str]) -> Problem:
    """Returns that one host cannot connect to another."""
    do = (
        "Open the ports between the hosts (firewall?), or choose another interface: --network-interface NAME, "
        f"on {host} one of {_listed(interfaces)}"
    )
    return Problem(f"It cannot connect to {host} at {address}: {why}.", do)


def no_tfdistkit(found: Mapping[str, Any], version: str) -> Problem:
    """Returns that tfdistkit is not there."""
    do = f"Install it: {_pip(found, version)}. Or name another Python: --python PATH."
    return Problem(f"tfdistkit cannot be imported there ({found['why']}).", do)


def other_tfdistkit(found: Mapping[str, Any], version: str) -> Problem:
    """Returns that tfdistkit is of another version than here."""
    text = f"It has tfdistkit {found['tfdistkit']}, and here it is {version}."
    return Problem(text, f"Install the same: {_pip(found, version)}")


def no_horovod(found: Mapping[str, Any]) -> Problem:
    """Returns that Horovod is not there."""
    do = f"Build it there: {found['executable']} -m tfdistkit horovod install"
    return Problem("Horovod is not installed there.", do)


def no_script(found: Mapping[str, Any]) -> Problem:
    """Returns that the script is not there."""
    why = found.get("why_script")
    return Problem(f"The script is not there ({why})." if why else "The module is not there.", _COPY)


def other_script() -> Problem:
    """Returns that the script differs from the one here."""
    return Problem("Its script is another one than here.", _COPY)


def other_version(package: str, version: str | None, usual: str | None) -> Problem:
    """Returns that a host differs from the others."""
    do = "Name the same Python for all: --python PATH." if package == "python" else "Install the same everywhere."
    text = f"{_NAMES[package]} is {version or 'not there'}, and on the others it is {usual or 'not there'}."
    return Problem(text, do)


def same_machine(first: str) -> Problem:
    """Returns that a host is one that was named before: the two would take each other's ports."""
    return Problem(f"It is the same machine as {first}.", "Name it once, with the slots of both.")


def mark_same_machines(looks: Sequence[HostReport]) -> None:
    """Finds hosts that are one machine under two names."""
    seen: dict[str, str] = {}
    for look in looks:
        if look.address is not None:
            first = seen.setdefault(look.address, look.host)
            if first != look.host:
                look.problems.append(same_machine(first))


def most_common(values: Sequence[str | None]) -> str | None:
    """Returns the value that most have; of several, the one that comes first."""
    return max(values, key=values.count) if values else None


def _pip(found: Mapping[str, Any], version: str) -> str:
    return f"in a clone of tfdistkit {version} on that host, {found['executable']} -m pip install ."


def _listed(interfaces: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces.items() if name != "lo") or "(none)"
