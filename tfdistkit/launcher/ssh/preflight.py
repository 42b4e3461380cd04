"""Before any worker starts: is every host there, is it like the others, can they reach each other? One line for each.

All hosts are asked at the same time, in three rounds with one deadline.
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
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.launcher.ssh import problems
from tfdistkit.launcher.ssh.connection import Question
from tfdistkit.launcher.ssh.connection_pool import ConnectionPool
from tfdistkit.launcher.ssh.preflight_report import PACKAGES, HostReport, compare, describe

# The variables of a host that a plan respects.
_RESPECTED = (
    env.INTRA_OP_THREADS,
    env.INTER_OP_THREADS,
    env.OMP_THREADS,
    env.UNBUFFERED,
    horovod.GLOO_INTERFACE,
    NCCL_INTERFACE,
)
# A host that was silent to the end takes nothing of what the others need for the next round.
_ROUND_S = 5.0
# How long one host may take to connect to another.
_CONNECT_S = 5.0


@dataclass(frozen=True)
class Checked:
    """Hosts that can take part.

    Args:
        places: Where each process runs, in the order of `planning.plan_processes`.
        table: One line for each host.
    """

    places: tuple[Place, ...]
    table: str


def check_hosts(pool: ConnectionPool, job: JobSpec, should_stop: Callable[[], bool]) -> Checked:
    """Checks the hosts of a job.

    Args:
        pool: Connections to those of its hosts that it uses, in their order.
        job: What the user wants.
        should_stop: Whether somebody has asked to end.

    Raises:
        HostsNotReady: if one of them cannot take part; the message holds the table, and what to do.
    """
    assert job.hosts is not None
    numbers = hosts_of_tasks(job)
    names = [job.hosts.slots[number].host for number in numbers]
    looks = [HostReport(one.host, one) for one in pool.connections]
    preflight = Preflight(pool, job.hosts, looks, should_stop)
    preflight.meet()
    preflight.choose_addresses()
    preflight.inspect_environment(_wanted(job), job.env, [names.count(look.host) for look in looks])
    compare(looks, _own_checksum(job), needs_horovod=job.backend == "horovod")
    preflight.connect_all()
    table = describe(looks)
    if any(look.problems for look in looks):
        bad = {look.host: tuple(look.problems) for look in looks if look.problems}
        raise problems.HostsNotReady(table, bad, len(looks))
    by_host = {look.host: look for look in looks}
    taken = dict.fromkeys(by_host, 0)
    places = []
    for name in names:
        look = by_host[name]
        places.append(
            Place(
                look.ports[taken[name]],
                look.facts["cores"],
                look.host,
                look.address or HERE,
                look.interface,
                look.facts["variables"],
            )
        )
        taken[name] += 1
    return Checked(tuple(places), table)


class Preflight:
    """The rounds of questions, all hosts at once.

    Args:
        pool: The hosts.
        hosts: How they are used.
        looks: What is found out, in the order of the hosts.
        should_stop: Whether somebody has asked to end.
    """

    def __init__(
        self, pool: ConnectionPool, hosts: HostsSpec, looks: Sequence[HostReport], should_stop: Callable[[], bool]
    ):
        self._pool, self._hosts, self._looks, self._should_stop = pool, hosts, looks, should_stop
        self._started = time.monotonic()

    @property
    def _left_s(self) -> float:
        return max(_ROUND_S, self._hosts.start_timeout_s - (time.monotonic() - self._started))

    @property
    def _good(self) -> list[HostReport]:
        return [look for look in self._looks if not look.problems]

    def meet(self) -> None:
        """Who is there, and what is it?"""
        for look, answer in self._ask_all("describe", names=list(_RESPECTED)):
            look.facts = answer
            if not look.is_here:
                # When it came, against when it was written: wrong by the time of the way, far less than a second.
                came = time.time() - (time.monotonic() - (look.answered_at or 0.0))
                look.connection.clock_s = came - answer["time"]

    def choose_addresses(self) -> None:
        """Where the others reach each host: the interface that is asked for, or the one that ssh came by."""
        asked = self._hosts.interface
        others = [look for look in self._good if not look.is_here]
        for look in self._good:
            interfaces: Mapping[str, str] = look.facts["interfaces"]
            if asked is not None:
                look.address, look.interface = interfaces.get(asked), asked
                if look.address is None:
                    look.problems.append(problems.no_interface(asked, interfaces))
            elif not look.is_here:
                look.address = look.facts["ssh_address"]
            elif not others:
                look.address = HERE
            else:
                for _, address in self._ask_all("own_address", [look], address=others[0].facts["ssh_address"]):
                    look.address = address
            if look.address is None and not look.problems:
                look.problems.append(problems.no_address(interfaces))
            if look.interface is None:
                look.interface = next((name for name, ip in interfaces.items() if ip == look.address), None)
        problems.mark_same_machines(self._good)

    def inspect_environment(
        self, wanted: Mapping[str, Any], variables: Mapping[str, str], ports: Sequence[int]
    ) -> None:
        """What would a worker find there? And which ports are free?"""
        held = {
            look.host: self._pool.ask(look.connection, "hold_ports", count=count)
            for look, count in zip(self._looks, ports, strict=True)
            if not look.problems
        }
        seconds = self._left_s
        for look, answer in self._ask_all(
            "inspect_environment",
            python=self._hosts.python,
            folder=self._hosts.folder,
            variables=dict(variables),
            wanted=wanted,
            timeout_s=seconds,
        ):
            look.found = answer
        for look in self._good:
            answer = held[look.host].answer
            look.ports = answer or ()
            if answer is None:
                look.problems.append(problems.no_ports(held[look.host]))

    def connect_all(self) -> None:
        """Can each host connect to the ports of all others?"""
        good = self._good
        if len(good) < len(self._looks):
            return  # the rest is told first: it may be the reason
        asked = {}
        for look in good:
            others = [(one.host, one.address, port) for one in good if one is not look for port in one.ports]
            asked[look.host] = others
        timeout_s = min(_CONNECT_S, self._left_s)
        questions = [
            self._pool.ask(
                look.connection, "connect", addresses=[one[1:] for one in asked[look.host]], timeout_s=timeout_s
            )
            for look in good
        ]
        for look, answer in self._answers(good, questions):
            failed = {one[0]: (one[1], one[2], why) for one, why in zip(asked[look.host], answer, strict=True) if why}
            look.reaches = not failed
            for host, (address, port, why) in failed.items():
                interfaces = next(one.facts["interfaces"] for one in good if one.host == host)
                look.problems.append(problems.no_way(host, f"{address}:{port}", why, interfaces))
        for look in good:
            self._pool.ask(look.connection, "release_ports")

    def _ask_all(
        self, what: str, looks: Sequence[HostReport] | None = None, **asked: Any
    ) -> list[tuple[HostReport, Any]]:
        chosen = self._good if looks is None else looks
        return self._answers(chosen, [self._pool.ask(look.connection, what, **asked) for look in chosen])

    def _answers(self, looks: Sequence[HostReport], questions: Sequence[Question]) -> list[tuple[HostReport, Any]]:
        """The answers that come in time; who gives none has a problem."""
        self._pool.wait_for(lambda: all(one.is_done for one in questions), self._left_s, self._should_stop)
        if self._should_stop():
            raise UnsupportedError("It was ended while the hosts were checked.")
        answers = []
        for look, question in zip(looks, questions, strict=True):
            if not question.is_done:
                self._pool.give_up(look.connection, "It did not answer in time.")
                look.problems.append(problems.silent(look.connection, self._hosts.start_timeout_s))
            elif look.connection.loss is not None:
                look.problems.append(problems.of_connection(look.connection))
            elif question.error is not None:
                look.problems.append(problems.of_answer(question, self._hosts))
            else:
                look.answered_at = question.answered_at
                look.seconds = look.seconds or look.answered_at - self._started
                answers.append((look, question.answer))
        return answers


def _wanted(job: JobSpec) -> dict[str, Any]:
    is_module = job.program[:1] == ("-m",)
    return {
        "packages": PACKAGES,
        "module": job.program[1] if is_module else None,
        "script": None if is_module else _script_file(job),
    }


def _script_file(job: JobSpec) -> str:
    """What is read first of a script: of a folder, its `__main__.py`."""
    script = job.program[0]
    return os.path.join(script, "__main__.py") if os.path.isdir(script) else script


def _own_checksum(job: JobSpec) -> str | None:
    """None as well where the script is not on this machine: then that on the hosts is compared with nothing."""
    try:
        return None if job.program[:1] == ("-m",) else hashlib.sha256(Path(_script_file(job)).read_bytes()).hexdigest()
    except OSError:
        return None
