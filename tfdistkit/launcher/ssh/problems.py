"""The problems that the preflight check can find on a host, each with a fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfdistkit.errors import UnsupportedError
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.ssh.connection import Connection, Question

# A part of ssh's message -> the fix.
_OF_SSH = (
    ("Could not resolve hostname", "Correct the name, or give it an address in the DNS, /etc/hosts or ~/.ssh/config."),
    ("Host key verification failed", "Check its host key and accept it once: ssh {host} true"),
    ("Permission denied", "Authorize your key on it: ssh-copy-id {host}. Or name the key: --ssh-identity-file FILE."),
    ("Connection refused", "Start sshd on it, or name its port: --ssh-port PORT."),
    ("timed out", "Check that it is on, and that no firewall blocks the connection."),
    ("No route to host", "Check that it is on, and the network to it."),
    ("not found", "Name its Python: --python PATH."),
    ("No such file or directory", "Name its Python: --python PATH."),
    ("tfdistkit needs Python", "Name a newer Python on it: --python PATH."),
    ("Unknown option: -", "Name a newer Python on it: --python PATH."),
)
_COPY = "Copy it to the same path on the host, or use a folder that all hosts share."
_NAMES = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras", "horovod": "Horovod"}


@dataclass(frozen=True)
class Problem:
    """A problem of a host.

    Args:
        text: The problem, as a sentence.
        do: The fix, as an imperative.
    """

    text: str
    do: str

    def __str__(self) -> str:
        return f"{self.text} {self.do}".strip()


class HostsNotReady(UnsupportedError):
    """Hosts failed the preflight check.

    Args:
        table: The preflight report, one line per host.
        problems: Host -> its problems.
        count: The number of hosts.
    """

    def __init__(self, table: str, problems: Mapping[str, Sequence[Problem]], count: int):
        self.table, self.problems = table, problems
        headline = f"{len(problems)} of {count} hosts are not ready, so nothing was started: {', '.join(problems)}."
        lines = [f"{host}: {problem}" for host, listed in problems.items() for problem in listed]
        super().__init__("\n".join([headline, table, *lines]))


def of_connection(connection: Connection) -> Problem:
    """Problem: the connection failed or was lost; the text holds ssh's message."""
    assert connection.loss is not None
    text = connection.loss.text
    do = next((do for words, do in _OF_SSH if words in text), "Try it by hand: ssh {host} true")
    return Problem(text, do.format(host=connection.host))


def silent(connection: Connection, timeout_s: float) -> Problem:
    """Problem: the host did not answer."""
    where = "the preflight check" if connection.is_up else f"ssh {connection.host}"
    return Problem(
        f"It did not answer within {timeout_s:g} s ({where}).",
        "Check that it is on and not overloaded, or wait longer: --start-timeout SECONDS.",
    )


def of_answer(question: Question, hosts: HostsSpec) -> Problem:
    """Problem: the agent answered with an error."""
    if question.kind in ("FileNotFoundError", "NotADirectoryError"):
        do = "Create it on the host, use a folder that all hosts share, or name another one: --working-dir DIR."
        return Problem(f"The folder {hosts.folder} does not exist.", do)
    return Problem(f"{question.error}.", "")


def no_ports(question: Question) -> Problem:
    """Problem: the host has too few free ports."""
    return Problem(f"It has too few free ports: {question.error}", "List the processes that hold them: ss -ltnp")


def no_interface(name: str, interfaces: Mapping[str, str]) -> Problem:
    """Problem: the requested interface has no address."""
    do = f"Choose one of these: --network-interface {_listed(interfaces)}"
    return Problem(f"It has no interface {name!r} with an address.", do)


def no_address(interfaces: Mapping[str, str]) -> Problem:
    """Problem: the host's address for its peers is unknown."""
    do = f"Choose an interface: --network-interface {_listed(interfaces)}"
    return Problem("Its address for the other hosts is unknown.", do)


def no_way(host: str, address: str, why: str, interfaces: Mapping[str, str]) -> Problem:
    """Problem: the host cannot connect to a peer."""
    do = (
        "Open the ports between the hosts (firewall?), or choose another interface: --network-interface NAME, "
        f"on {host} one of {_listed(interfaces)}"
    )
    return Problem(f"It cannot connect to {host} at {address}: {why}.", do)


def no_tfdistkit(found: Mapping[str, Any], version: str) -> Problem:
    """Problem: tfdistkit is not installed."""
    do = f"Install it: {_pip(found, version)}. Or name another Python: --python PATH."
    return Problem(f"tfdistkit cannot be imported on it ({found['why']}).", do)


def other_tfdistkit(found: Mapping[str, Any], version: str) -> Problem:
    """Problem: tfdistkit has another version than on this machine."""
    text = f"It has tfdistkit {found['tfdistkit']}, and this machine has {version}."
    return Problem(text, f"Install the same version: {_pip(found, version)}")


def no_horovod(found: Mapping[str, Any]) -> Problem:
    """Problem: Horovod is not installed."""
    do = f"Build it on the host: {found['executable']} -m tfdistkit horovod install"
    return Problem("Horovod is not installed on it.", do)


def no_script(found: Mapping[str, Any]) -> Problem:
    """Problem: the script or module is missing."""
    why = found.get("why_script")
    return Problem(f"It cannot read the script ({why})." if why else "It does not have the module.", _COPY)


def other_script() -> Problem:
    """Problem: the script differs from that on this machine."""
    return Problem("Its script differs from that on this machine.", _COPY)


def other_version(package: str, version: str | None, usual: str | None) -> Problem:
    """Problem: a package has another version than on most hosts."""
    do = "Name the same Python for all: --python PATH." if package == "python" else "Install the same version on all."
    text = f"{_NAMES[package]} is {version or 'missing'}, and on the other hosts it is {usual or 'missing'}."
    return Problem(text, do)


def same_machine(first: str) -> Problem:
    """Problem: two names of one machine; their port reservations would conflict."""
    return Problem(f"It is the same machine as {first}.", "Name it once, with the slots of both.")


def most_common(values: Sequence[str | None]) -> str | None:
    """Returns the most common value; the first of several."""
    return max(values, key=values.count) if values else None


def _pip(found: Mapping[str, Any], version: str) -> str:
    return f"in a clone of tfdistkit {version} on that host, {found['executable']} -m pip install ."


def _listed(interfaces: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces.items() if name != "lo") or "(none)"
