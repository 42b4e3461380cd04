"""What can be wrong with a host, in a sentence, and what mends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.remote_connection import Connection, Question

if TYPE_CHECKING:
    from tfdistkit.launcher.remote_check import HostLook

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
)
OTHER_SCRIPT = "Its script is another one than here. Copy the script to the host, or use a folder that all hosts share."


def headline(looks: Sequence[HostLook]) -> str:
    """Returns what is wrong in one sentence."""
    bad = [look.host for look in looks if look.problems]
    return f"{len(bad)} of {len(looks)} hosts cannot take part, so nothing was started: {', '.join(bad)}."


def listed(looks: Sequence[HostLook]) -> str:
    """Returns all problems, a line for each."""
    return "\n".join(f"{look.host}: {problem}" for look in looks for problem in look.problems)


def of_connection(connection: Connection, hosts: HostsSpec) -> str:
    """Returns why there is no connection, in ssh's words, and what to do."""
    assert connection.loss is not None
    text = connection.loss.text
    do = next((do for words, do in _OF_SSH if words in text), "Try what it says by hand: ssh {host} true")
    return f"{text} {do.format(host=connection.host)}"


def silent(connection: Connection, timeout_s: float) -> str:
    """Returns that a host did not answer, and what to do."""
    place = "the check" if connection.is_up else f"ssh {connection.host}"
    return (
        f"It did not answer within {timeout_s:g} s ({place}). Look whether it is on and not overloaded; "
        "--start-timeout SECONDS waits longer."
    )


def of_answer(question: Question, hosts: HostsSpec) -> str:
    """Returns why an agent could not answer, and what to do."""
    if question.kind in ("FileNotFoundError", "NotADirectoryError"):
        return (
            f"The folder {hosts.folder} is not there. Make it on the host, use a folder that all hosts share, "
            "or name another one: --working-dir DIR."
        )
    return f"{question.error}."


def no_interface(name: str, interfaces: Mapping[str, str]) -> str:
    """Returns that the interface that was asked for has no address."""
    return f"It has no interface {name!r} with an address. Choose one of them: --network-interface {_names(interfaces)}"


def no_way(host: str, address: str, why: str, interfaces: Mapping[str, str]) -> str:
    """Returns that one host cannot connect to another."""
    return (
        f"It cannot connect to {host} at {address}: {why}. Open the ports between the hosts (firewall?), or choose "
        f"another interface: --network-interface NAME, on {host} one of {_names(interfaces)}"
    )


def no_tfdistkit(found: Mapping[str, Any], version: str) -> str:
    """Returns that tfdistkit is not there."""
    return (
        f"tfdistkit cannot be imported there ({found['why']}). Install it: "
        f"{found['executable']} -m pip install tfdistkit=={version}. Or name another Python: --python PATH."
    )


def other_tfdistkit(found: Mapping[str, Any], version: str) -> str:
    """Returns that tfdistkit is of another version than here."""
    return (
        f"It has tfdistkit {found['tfdistkit']}, and here it is {version}. Install the same: "
        f"{found['executable']} -m pip install tfdistkit=={version}"
    )


def no_horovod(found: Mapping[str, Any]) -> str:
    """Returns that Horovod is not there."""
    return f"Horovod is not installed there. Build it there: {found['executable']} -m tfdistkit horovod install"


def no_script(found: Mapping[str, Any]) -> str:
    """Returns that the script is not there."""
    why = found.get("why_script")
    what = f"The script is not there ({why})." if why else "The module is not there."
    return f"{what} Copy it to the same place on the host, or use a folder that all hosts share."


def other_version(package: str, version: str | None, usual: str | None) -> str:
    """Returns that a host differs from the others."""
    name = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras", "horovod": "Horovod"}[package]
    do = "Name the same Python for all: --python PATH." if package == "python" else "Install the same everywhere."
    return f"{name} is {version or 'not there'}, and on the others it is {usual or 'not there'}. {do}"


def most_common(values: Sequence[str | None]) -> str | None:
    """Returns the value that most have; of several, the one that comes first."""
    return max(values, key=values.count) if values else None


def mark_same_machines(looks: Sequence[HostLook]) -> None:
    """Finds hosts that are one machine under two names: they would take each other's ports."""
    seen: dict[str, str] = {}
    for look in looks:
        if look.address is None:
            continue
        first = seen.setdefault(look.address, look.host)
        if first != look.host:
            look.problems.append(f"It is the same machine as {first}. Name it once, with the slots of both.")


def _names(interfaces: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces.items() if name != "lo") or "(none)"
