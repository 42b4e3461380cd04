"""Before any worker starts: is every host there, is it like the others, can they reach each other? One line for each.

All hosts are asked at the same time, in three rounds with one deadline.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfdistkit import __version__, env
from tfdistkit.cluster import horovod
from tfdistkit.errors import UnsupportedError
from tfdistkit.launcher import remote_problems as problems
from tfdistkit.launcher.hosts import HostsSpec, is_this_machine
from tfdistkit.launcher.places import HERE, Place
from tfdistkit.launcher.planning import hosts_of_tasks
from tfdistkit.launcher.rank_variables import NCCL_INTERFACE
from tfdistkit.launcher.remote_connection import Connection, Question
from tfdistkit.launcher.remote_fleet import Fleet
from tfdistkit.launcher.spec import JobSpec

# What must be the same on all hosts, and the names that it may be installed under.
PACKAGES = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly"),
    "keras": ("keras", "keras-nightly"),
    "horovod": ("horovod",),
}
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


@dataclass
class HostLook:
    """What is known of one host; `problems` has a sentence for each thing that is wrong, with what mends it."""

    host: str
    connection: Connection
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


@dataclass(frozen=True)
class Checked:
    """Hosts that can take part.

    Args:
        places: Where each process runs, in the order of `planning.plan_processes`.
        table: One line for each host.
    """

    places: tuple[Place, ...]
    table: str


def check_hosts(fleet: Fleet, job: JobSpec, hurry: Callable[[], bool]) -> Checked:
    """Checks the hosts of a job.

    Args:
        fleet: Connections to those of its hosts that it uses, in their order.
        job: What the user wants.
        hurry: Whether somebody has asked to end.

    Raises:
        HostsNotReady: if one of them cannot take part; the message holds the table, and what to do.
    """
    assert job.hosts is not None
    numbers = hosts_of_tasks(job)
    names = [job.hosts.slots[number].host for number in numbers]
    looks = [HostLook(one.host, one) for one in fleet.connections]
    examination = Examination(fleet, job.hosts, looks, hurry)
    examination.meet()
    examination.choose_addresses()
    examination.look_around(_wanted(job), job.env, [names.count(look.host) for look in looks])
    compare(looks, _own_checksum(job), needs_horovod=job.backend == "horovod")
    examination.connect_all()
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


class Examination:
    """The rounds of questions, all hosts at once.

    Args:
        fleet: The hosts.
        hosts: How they are used.
        looks: What is found out, in the order of the hosts.
        hurry: Whether somebody has asked to end.
    """

    def __init__(self, fleet: Fleet, hosts: HostsSpec, looks: Sequence[HostLook], hurry: Callable[[], bool]):
        self._fleet, self._hosts, self._looks, self._hurry = fleet, hosts, looks, hurry
        self._started = time.monotonic()

    @property
    def _left_s(self) -> float:
        return max(_ROUND_S, self._hosts.start_timeout_s - (time.monotonic() - self._started))

    @property
    def _good(self) -> list[HostLook]:
        return [look for look in self._looks if not look.problems]

    def meet(self) -> None:
        """Who is there, and what is it?"""
        asked_at = time.time()
        for look, answer in self._ask_all("describe", names=list(_RESPECTED)):
            look.facts = answer
            # When it was written down, compared with now: halfway between question and answer is good enough.
            look.connection.clock_s = (asked_at + time.time()) / 2 - answer["time"] if not look.is_here else 0.0

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
                look.address = look.facts["came_by"]
            elif not others:
                look.address = HERE
            else:
                (((_, look.address)),) = self._ask_all("own_address", [look], address=others[0].facts["came_by"])
            if look.address is not None and look.interface is None:
                look.interface = next((name for name, ip in interfaces.items() if ip == look.address), None)
        problems.mark_same_machines(self._good)

    def look_around(self, wanted: Mapping[str, Any], variables: Mapping[str, str], ports: Sequence[int]) -> None:
        """What would a worker find there? And which ports are free?"""
        held = {
            look.host: self._fleet.ask(look.connection, "hold_ports", count=count)
            for look, count in zip(self._looks, ports, strict=True)
            if not look.problems
        }
        seconds = self._left_s
        for look, answer in self._ask_all(
            "look_around",
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
            self._fleet.ask(
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
            self._fleet.ask(look.connection, "release_ports")

    def _ask_all(
        self, what: str, looks: Sequence[HostLook] | None = None, **asked: Any
    ) -> list[tuple[HostLook, Any]]:
        chosen = self._good if looks is None else looks
        return self._answers(chosen, [self._fleet.ask(look.connection, what, **asked) for look in chosen])

    def _answers(self, looks: Sequence[HostLook], questions: Sequence[Question]) -> list[tuple[HostLook, Any]]:
        """The answers that come in time; who gives none has a problem."""
        self._fleet.wait_for(lambda: all(one.is_done for one in questions), self._left_s, self._hurry)
        if self._hurry():
            raise UnsupportedError("It was ended while the hosts were checked.")
        answers = []
        for look, question in zip(looks, questions, strict=True):
            if not question.is_done:
                self._fleet.give_up(look.connection, "It did not answer in time.")
                look.problems.append(problems.silent(look.connection, self._hosts.start_timeout_s))
            elif look.connection.loss is not None:
                look.problems.append(problems.of_connection(look.connection))
            elif question.error is not None:
                look.problems.append(problems.of_answer(question, self._hosts))
            else:
                look.seconds = look.seconds or question.answered_at - self._started
                answers.append((look, question.answer))
        return answers


def compare(looks: Sequence[HostLook], checksum: str | None, *, needs_horovod: bool) -> None:
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


def describe(looks: Sequence[HostLook]) -> str:
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


def _wanted(job: JobSpec) -> dict[str, Any]:
    is_module = job.program[:1] == ("-m",)
    return {
        "packages": PACKAGES,
        "module": job.program[1] if is_module else None,
        "script": None if is_module else job.program[0],
    }


def _own_checksum(job: JobSpec) -> str | None:
    """None as well where the script is not on this machine: then that on the hosts is compared with nothing."""
    try:
        return None if job.program[:1] == ("-m",) else hashlib.sha256(Path(job.program[0]).read_bytes()).hexdigest()
    except OSError:
        return None


def _series(package: str, version: str | None) -> str | None:
    """What must be equal: of Python the first two numbers."""
    return ".".join(version.split(".")[:2]) if package == "python" and version else version
