"""The preflight report: facts and problems of each host, and the table for the user. Plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdistkit import __version__
from tfdistkit.launcher.hosts import is_this_machine
from tfdistkit.launcher.ssh import problems
from tfdistkit.launcher.ssh.connection import Connection

# The packages whose versions must be equal on all hosts, with the names of their distributions.
PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
    "horovod": ("horovod",),
}


@dataclass
class HostReport:
    """The facts about one host; each of its `problems` comes with a fix."""

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


def compare(reports: Sequence[HostReport], checksum: str | None, *, needs_horovod: bool) -> None:
    """Adds a problem for everything that is missing on a host, or differs from its peers.

    Args:
        reports: The reports of the hosts.
        checksum: The script's SHA-256 on the launcher's machine; None for a module.
        needs_horovod: Whether Horovod is required.
    """
    good = [report for report in reports if report.found]
    for report in good:
        found = report.found
        if found["tfdistkit"] is None:
            report.problems.append(problems.no_tfdistkit(found, __version__))
        elif found["tfdistkit"] != __version__:
            report.problems.append(problems.other_tfdistkit(found, __version__))
        if needs_horovod and found["horovod"] is None:
            report.problems.append(problems.no_horovod(found))
        if found["script"] is None:
            report.problems.append(problems.no_script(found))
        elif checksum is not None and found["script"] != checksum:
            report.problems.append(problems.other_script())
    for package in ("python", *PACKAGES):
        versions = {report.host: _series(package, report.found[package]) for report in good}
        usual = problems.most_common(list(versions.values()))
        for report in good:
            if versions[report.host] != usual:
                report.problems.append(problems.other_version(package, report.found[package], usual))


def mark_same_machines(reports: Sequence[HostReport]) -> None:
    """Adds a problem to hosts that are one machine under two names."""
    seen: dict[str, str] = {}
    for report in reports:
        if report.address is not None:
            first = seen.setdefault(report.address, report.host)
            if first != report.host:
                report.problems.append(problems.same_machine(first))


def describe(reports: Sequence[HostReport]) -> str:
    """Returns the report as a table, one line per host.

    Args:
        reports: The reports of the hosts.
    """
    rows = [["host", "answers", "python", "tfdistkit", "tensorflow", "keras", "script", "address", "ports", "others"]]
    for report in reports:
        found = report.found
        script = "-" if not found else "no" if found["script"] is None else "there"
        address = f"{report.interface or '?'} {report.address}" if report.address else "-"
        rows.append(
            [
                report.host,
                "no" if report.seconds is None else "here" if report.is_here else f"{report.seconds:.1f} s",
                *(str(found.get(package) or "-") for package in ("python", "tfdistkit", "tensorflow", "keras")),
                script,
                address,
                f"{len(report.ports)} free" if report.ports else "-",
                {True: "reached", False: "not all", None: "-"}[report.reaches],
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _series(package: str, version: str | None) -> str | None:
    """Returns the part of a version that must be equal: major and minor for Python, else all of it."""
    return ".".join(version.split(".")[:2]) if package == "python" and version else version
