"""Checks the hosts of a job, and measures the links between them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def check_hosts(hosts: HostsSpec, env: Mapping[str, str]) -> list[Finding]:
    """Checks hosts and measures the links between them.

    Args:
        hosts: The hosts, one slot each.
        env: Variables for the processes there.
    """
    run_dir = temporary_run_dir(Path(tempfile.gettempdir()))
    job = JobSpec(len(hosts.slots), ("-m", "tfdistkit.doctor.probe"), run_dir, env, hosts=hosts)
    try:
        launcher = Launcher(job)
    except HostsNotReady as error:
        found = [Finding("hosts", "all", Level.PROBLEM, error.table)]
        bad = [(host, problem) for host, listed in error.problems.items() for problem in listed]
        return found + [Finding("hosts", host, Level.PROBLEM, problem.text, problem.do) for host, problem in bad]
    except TfdistkitError as error:
        return [Finding("hosts", "all", Level.PROBLEM, str(error))]
    try:
        found = [Finding("hosts", "all", Level.GOOD, launcher.table)]
        return found + [_measure(launcher, *pair) for pair in _pairs(launcher.places)]
    finally:
        launcher.close()


def _pairs(places: Sequence[Place]) -> list[tuple[Place, Place]]:
    pairs = list(itertools.combinations(places, 2))
    return pairs if len(pairs) <= _MOST_PAIRS else list(zip(places, [*places[1:], places[0]], strict=True))


def _measure(launcher: Launcher, server: Place, client: Place) -> Finding:
    name = f"{client.host} -> {server.host}"
    try:
        link = launcher.measure(server, client, _MEASURE_S)
    except TfdistkitError as error:
        return Finding("links", name, Level.PROBLEM, str(error), "Check the network between the two hosts.")
    told = f"{link['bytes_per_s'] * 8 / 1e9:.2f} Gbit/s, {link['round_trip_s'] * 1e3:.2f} ms round trip"
    if link["bytes_per_s"] >= _SLOW_BYTES_PER_S and link["round_trip_s"] <= _LONG_ROUND_TRIP_S:
        return Finding("links", name, Level.GOOD, told)
    do = "Choose a faster interface, if the hosts have one: --network-interface NAME"
    return Finding("links", name, Level.WARNING, told, do)
