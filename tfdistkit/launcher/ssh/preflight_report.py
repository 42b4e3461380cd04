"""What is known of each host, what is wrong with one of several, and all of it as a table: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdistkit import __version__
from tfdistkit.launcher.hosts import is_this_machine
from tfdistkit.launcher.ssh import problems
from tfdistkit.launcher.ssh.connection import Connection

# What must be the same on all hosts, and the names that it may be installed under.
PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
    "horovod": ("horovod",),
}


@dataclass
class HostReport:
    """What is known of one host; `problems` has a sentence for each thing that is wrong, with what mends it."""

    host: str
    connection: Connection
    answered_at: float | None = None
    seconds: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)
    address: str | None = None
    interface: str | None = None
    ports: Sequence[int] = ()
    reaches: bool | None = None
    problems: list[problems.Problem] = field(default_factory=list)

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return is_this_machine(self.host)


def compare(looks: Sequence[HostReport], checksum: str | None, *, needs_horovod: bool) -> None:
    """Finds what is missing on a host, or different from the others.

    Args:
        looks: What was found on the hosts; their problems grow.
        checksum: The script's SHA-256 where the launcher is; None for a module.
        needs_horovod: Whether Horovod must be there.
    """
    good = [look for look in looks if look.found]
    for look in good:
        found = look.found
        if found["tfdistkit"] is None:
            look.problems.append(problems.no_tfdistkit(found, __version__))
        elif found["tfdistkit"] != __version__:
            look.problems.append(problems.other_tfdistkit(found, __version__))
        if needs_horovod and found["horovod"] is None:
            look.problems.append(problems.no_horovod(found))
        if found["script"] is None:
            look.problems.append(problems.no_script(found))
        elif checksum is not None and found["script"] != checksum:
            look.problems.append(problems.other_script())
    for package in ("python", *PACKAGES):
        versions = {look.host: _series(package, look.found[package]) for look in good}
        usual = problems.most_common(list(versions.values()))
        for look in good:
            if versions[look.host] != usual:
                look.problems.append(problems.other_version(package, look.found[package], usual))


def describe(looks: Sequence[HostReport]) -> str:
    """Returns a table with one line for each host.

    Args:
        looks: What is known of them.
    """
    rows = [["host", "answers", "python", "tfdistkit", "tensorflow", "keras", "script", "address", "ports", "others"]]
    for look in looks:
        found = look.found
        script = "-" if not found else "no" if found["script"] is None else "there"
        address = f"{look.interface or '?'} {look.address}" if look.address else "-"
        rows.append(
            [
                look.host,
                "no" if look.seconds is None else "here" if look.is_here else f"{look.seconds:.1f} s",
                *(str(found.get(package) or "-") for package in ("python", "tfdistkit", "tensorflow", "keras")),
                script,
                address,
                f"{len(look.ports)} free" if look.ports else "-",
                {True: "reached", False: "not all", None: "-"}[look.reaches],
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _series(package: str, version: str | None) -> str | None:
    """What must be equal: of Python the first two numbers."""
    return ".".join(version.split(".")[:2]) if package == "python" and version else version
