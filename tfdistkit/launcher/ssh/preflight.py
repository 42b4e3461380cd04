"""The preflight check: every host answers, has the same versions and script, and can connect to its peers.

It asks all hosts in parallel, in three rounds with one deadline, before any worker starts.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdistkit import env
from tfdistkit.cluster.environments import horovod
from tfdistkit.errors import UnsupportedError
from tfdistkit.launcher.hosts import HostsSpec
from tfdistkit.launcher.placement import HERE, Place
from tfdistkit.launcher.planning import hosts_of_tasks
from tfdistkit.launcher.rank_variables import NCCL_INTERFACE
from tfdistkit.launcher.registry import row_of
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.launcher.ssh import problems
from tfdistkit.launcher.ssh.connection import Question
from tfdistkit.launcher.ssh.connection_pool import ConnectionPool
from tfdistkit.launcher.ssh.preflight_report import PACKAGES, HostReport, compare, describe, mark_same_machines

# The variables of a host that take precedence over the plan's.
_RESPECTED = (
    env.INTRA_OP_THREADS,
    env.INTER_OP_THREADS,
    env.OMP_THREADS,
    env.UNBUFFERED,
    horovod.GLOO_INTERFACE,
    NCCL_INTERFACE,
)
# The minimum time of a round, so that a silent host does not use up the time of its peers.
_ROUND_S = 5.0
# Timeout of a connection between two hosts, in seconds.
_CONNECT_S = 5.0


@dataclass(frozen=True)
class Checked:
    """The result of a successful preflight check.

    Args:
        places: The placement of each process, in the order of `planning.plan_processes`.
        table: The preflight report, one line per host.
    """

    places: tuple[Place, ...]
    table: str


def check_hosts(pool: ConnectionPool, job: JobSpec, should_stop: Callable[[], bool]) -> Checked:
    """Runs the preflight check of a job's hosts.

    Args:
        pool: Connections to the hosts that the job uses, in order.
        job: The job.
        should_stop: Whether to abort the check.

    Raises:
        HostsNotReady: if a host fails the check; the message holds the report and the fixes.
    """
    assert job.hosts is not None
    numbers = hosts_of_tasks(job)
    names = [job.hosts.slots[number].host for number in numbers]
    reports = [HostReport(one.host, one) for one in pool.connections]
    preflight = Preflight(pool, job.hosts, reports, should_stop)
    preflight.describe_hosts()
    preflight.choose_addresses()
    preflight.inspect_environment(wanted_of(job), job.env, [names.count(report.host) for report in reports])
    compare(reports, own_checksum(job), needs_horovod=row_of(job.backend).needs_horovod)
    preflight.connect_all()
    table = describe(reports)
    require_ready(reports, table)
    return Checked(places_of(names, reports), table)


def require_ready(reports: Sequence[HostReport], table: str) -> None:
    """Checks that no host has a problem.

    Args:
        reports: The reports of the hosts.
        table: The preflight report.

    Raises:
        HostsNotReady: if one has; the message holds the report and the fixes.
    """
    if any(report.problems for report in reports):
        bad = {report.host: tuple(report.problems) for report in reports if report.problems}
        raise problems.HostsNotReady(table, bad, len(reports))


def places_of(names: Sequence[str], reports: Sequence[HostReport]) -> tuple[Place, ...]:
    """Returns the placement of each process, each with a port of its own.

    Args:
        names: The host of each process.
        reports: The reports of the hosts, without problems.
    """
    by_host = {report.host: report for report in reports}
    taken = dict.fromkeys(by_host, 0)
    places = []
    for name in names:
        report = by_host[name]
        places.append(
            Place(
                report.ports[taken[name]],
                report.facts["cores"],
                report.host,
                report.address or HERE,
                report.interface,
                report.facts["variables"],
            )
        )
        taken[name] += 1
    return tuple(places)


class Preflight:
    """The rounds of the preflight check, each on all hosts in parallel.

    Args:
        pool: The connections to the hosts.
        hosts: The hosts of the job.
        reports: The reports to fill in, in the order of the hosts.
        should_stop: Whether to abort the check.
    """

    def __init__(
        self, pool: ConnectionPool, hosts: HostsSpec, reports: Sequence[HostReport], should_stop: Callable[[], bool]
    ):
        self._pool, self._hosts, self._reports, self._should_stop = pool, hosts, reports, should_stop
        self._started = time.monotonic()

    @property
    def _left_s(self) -> float:
        return max(_ROUND_S, self._hosts.start_timeout_s - (time.monotonic() - self._started))

    @property
    def _good(self) -> list[HostReport]:
        return [report for report in self._reports if not report.problems]

    def describe_hosts(self) -> None:
        """Asks every host for its interfaces, cores, variables and clock."""
        for report, answer in self._ask_all("describe", names=list(_RESPECTED)):
            report.facts = answer
            if not report.is_here:
                # The clock offset; its error is the network latency, far less than a second.
                arrived = time.time() - (time.monotonic() - (report.answered_at or 0.0))
                report.connection.clock_s = arrived - answer["time"]

    def choose_addresses(self) -> None:
        """Chooses the address of each host: that of the requested interface, or of its ssh connection."""
        asked = self._hosts.interface
        others = [report for report in self._good if not report.is_here]
        for report in self._good:
            interfaces: Mapping[str, str] = report.facts["interfaces"]
            if asked is not None:
                report.address, report.interface = interfaces.get(asked), asked
                if report.address is None:
                    report.problems.append(problems.no_interface(asked, interfaces))
            else:
                report.address = self._default_address(report, others)
            if report.address is None and not report.problems:
                report.problems.append(problems.no_address(interfaces))
            if report.interface is None:
                report.interface = next((name for name, ip in interfaces.items() if ip == report.address), None)
        mark_same_machines(self._good)

    def _default_address(self, report: HostReport, others: Sequence[HostReport]) -> str | None:
        """Returns the address of a host towards its peers where the user names no interface."""
        if not report.is_here:
            address: str | None = report.facts["ssh_address"]
            return address
        if not others:
            return HERE
        asked = self._ask_all("own_address", [report], address=others[0].facts["ssh_address"])
        return next((address for _, address in asked), None)

    def inspect_environment(
        self, wanted: Mapping[str, Any], variables: Mapping[str, str], ports: Sequence[int]
    ) -> None:
        """Checks versions and the script in the environment of a worker, and reserves free ports."""
        held = {
            report.host: self._pool.ask(report.connection, "hold_ports", count=count)
            for report, count in zip(self._reports, ports, strict=True)
            if not report.problems
        }
        seconds = self._left_s
        for report, answer in self._ask_all(
            "inspect_environment",
            python=self._hosts.python,
            folder=self._hosts.folder,
            variables=dict(variables),
            wanted=wanted,
            timeout_s=seconds,
        ):
            report.found = answer
        for report in self._good:
            answer = held[report.host].answer
            report.ports = answer or ()
            if answer is None:
                report.problems.append(problems.no_ports(held[report.host]))

    def connect_all(self) -> None:
        """Checks that each host can connect to the ports of all its peers."""
        good = self._good
        if len(good) < len(self._reports):
            return  # problems found so far are reported first: they may be the cause
        asked = {}
        for report in good:
            others = [(one.host, one.address, port) for one in good if one is not report for port in one.ports]
            asked[report.host] = others
        timeout_s = min(_CONNECT_S, self._left_s)
        questions = [
            self._pool.ask(
                report.connection, "connect", addresses=[one[1:] for one in asked[report.host]], timeout_s=timeout_s
            )
            for report in good
        ]
        for report, answer in self._answers(good, questions):
            failed = {one[0]: (one[1], one[2], why) for one, why in zip(asked[report.host], answer, strict=True) if why}
            report.reaches = not failed
            for host, (address, port, why) in failed.items():
                interfaces = next(one.facts["interfaces"] for one in good if one.host == host)
                report.problems.append(problems.no_way(host, f"{address}:{port}", why, interfaces))
        for report in good:
            self._pool.ask(report.connection, "release_ports")

    def _ask_all(
        self, what: str, reports: Sequence[HostReport] | None = None, **asked: Any
    ) -> list[tuple[HostReport, Any]]:
        chosen = self._good if reports is None else reports
        return self._answers(chosen, [self._pool.ask(report.connection, what, **asked) for report in chosen])

    def _answers(self, reports: Sequence[HostReport], questions: Sequence[Question]) -> list[tuple[HostReport, Any]]:
        """Returns the answers that arrive in time; for the other hosts it records a problem."""
        self._pool.wait_for(lambda: all(one.is_done for one in questions), self._left_s, self._should_stop)
        if self._should_stop():
            raise UnsupportedError("The preflight check of the hosts was interrupted.")
        answers = []
        for report, question in zip(reports, questions, strict=True):
            if not question.is_done:
                self._pool.give_up(report.connection, "It did not answer in time.")
                report.problems.append(problems.silent(report.connection, self._hosts.start_timeout_s))
            elif report.connection.loss is not None:
                report.problems.append(problems.of_connection(report.connection))
            elif question.error is not None:
                report.problems.append(problems.of_answer(question, self._hosts))
            else:
                report.answered_at = question.answered_at
                report.seconds = report.seconds or report.answered_at - self._started
                answers.append((report, question.answer))
        return answers


def wanted_of(job: JobSpec) -> dict[str, Any]:
    """Returns what a host must have: packages, and the script or module.

    Args:
        job: The job.
    """
    is_module = job.program[:1] == ("-m",)
    return {
        "packages": PACKAGES,
        "module": job.program[1] if is_module else None,
        "script": None if is_module else _script_file(job),
    }


def _script_file(job: JobSpec) -> str:
    """Returns the file of a script; for a folder, its `__main__.py`."""
    script = job.program[0]
    return os.path.join(script, "__main__.py") if os.path.isdir(script) else script


def own_checksum(job: JobSpec) -> str | None:
    """Returns the SHA-256 of the script; None for a module, or if this machine does not have the script.

    Args:
        job: The job.
    """
    try:
        return None if job.program[:1] == ("-m",) else hashlib.sha256(Path(_script_file(job)).read_bytes()).hexdigest()
    except OSError:
        return None
