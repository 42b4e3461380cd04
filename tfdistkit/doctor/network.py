"""Checks the hosts of a job, and measures the links between them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tfdistkit.doctor.findings import Finding, Level
from tfdistkit.errors import TfdistkitError
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.placement import Place
from tfdistkit.launcher.spec import JobSpec, temporary_run_dir
from tfdistkit.launcher.ssh.backend import Launcher
from tfdistkit.launcher.ssh.problems import HostsNotReady

# Most pairs to measure, as each takes seconds; beyond, only neighbours in the list of hosts.
_MOST_PAIRS = 28
_MEASURE_S = 15.0
# Slower links make training over them unprofitable.
_SLOW_BYTES_PER_S = 50e6
_LONG_ROUND_TRIP_S = 0.005


class Link(NamedTuple):
    """A measured link.

    Args:
        name: From where to where.
        bytes_per_s: How much it carries.
        round_trip_s: How long a message and its answer take.
        is_memory: Whether it is the memory of a machine.
    """

    name: str
    bytes_per_s: float
    round_trip_s: float
    is_memory: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"

    @property
    def text(self) -> str:
        """What was measured."""
        return f"{self.bytes_per_s * 8 / 1e9:.2f} Gbit/s, {self.round_trip_s * 1e3:.2f} ms round trip"


def check_hosts(hosts: HostsSpec, env: Mapping[str, str]) -> tuple[list[Finding], list[Link]]:
    """Checks hosts and measures the links between them.

    Args:
        hosts: The hosts, one slot each.
        env: Variables for the processes there.

    Returns:
        The findings, and the links that could be measured.
    """
    run_dir = temporary_run_dir(Path(tempfile.gettempdir()))
    job = JobSpec(len(hosts.slots), ("-m", "tfdistkit.doctor.probe"), run_dir, env, hosts=hosts)
    try:
        launcher = Launcher(job)
    except HostsNotReady as error:
        found = [Finding("hosts", "all", Level.PROBLEM, error.table)]
        bad = [(host, problem) for host, listed in error.problems.items() for problem in listed]
        return found + [Finding("hosts", host, Level.PROBLEM, problem.text, problem.do) for host, problem in bad], []
    except TfdistkitError as error:
        return [Finding("hosts", "all", Level.PROBLEM, str(error))], []
    try:
        found = [Finding("hosts", "all", Level.GOOD, launcher.table)]
        measured = [_measure(launcher, *pair) for pair in _pairs(launcher.places)]
        found += [as_finding(one) if isinstance(one, Link) else one for one in measured]
        return found, [one for one in measured if isinstance(one, Link)]
    finally:
        launcher.close()


def _pairs(places: Sequence[Place]) -> list[tuple[Place, Place]]:
    pairs = list(itertools.combinations(places, 2))
    return pairs if len(pairs) <= _MOST_PAIRS else list(zip(places, [*places[1:], places[0]], strict=True))


def _measure(launcher: Launcher, server: Place, client: Place) -> Link | Finding:
    name = f"{client.host} -> {server.host}"
    try:
        link = launcher.measure(server, client, _MEASURE_S)
    except TfdistkitError as error:
        return Finding("links", name, Level.PROBLEM, str(error), "Check the network between the two hosts.")
    return Link(name, link["bytes_per_s"], link["round_trip_s"])


def as_finding(link: Link) -> Finding:
    """Rates a link.

    Args:
        link: The link.
    """
    if link.bytes_per_s >= _SLOW_BYTES_PER_S and link.round_trip_s <= _LONG_ROUND_TRIP_S:
        return Finding("links", link.name, Level.GOOD, link.text)
    do = "Choose a faster interface, if the hosts have one: --network-interface NAME"
    return Finding("links", link.name, Level.WARNING, link.text, f"{do}; or send less: docs/communication.md")
