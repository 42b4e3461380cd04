"""The room of a Ray cluster as its watcher tells it, without Ray: a pipe stands in for the watcher."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import OptionError
from tfdistkit.launcher.backend import NoRoomError
from tfdistkit.launcher.elasticity import ElasticSpec
from tfdistkit.launcher.preparing import Prepared
from tfdistkit.launcher.ray import capacity as module
from tfdistkit.launcher.ray.capacity import Capacity
from tfdistkit.launcher.ray.cluster import RaySpec
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.supervise.elastic import changes
from tfdistkit.supervise.elastic.notices import _named
from tfdistkit.supervise.elastic.room import Room

A1, B2 = HostSlots("a/1", 1), HostSlots("b/2", 2)
NODES = {"is": "nodes", "nodes": [["b/2", 2], ["a/1", 1]]}
FEWER = {"is": "nodes", "nodes": [["a/1", 1]]}
REFUSED = {"is": "refused", "kind": "address", "address": "head:6379", "why": "no answer"}

# Prints each line of a file as it comes, and ends with a line `end`.
_WATCHER = """
import os, sys, time
answers, told = int(sys.argv[1]), 0
while True:
    lines = open({path!r}).read().splitlines()
    for line in lines[told:]:
        if line == "end":
            sys.exit("no more")
        os.write(answers, line.encode() + b"\\n")
    told = len(lines)
    time.sleep(0.02)
"""


class Watched:
    """A `Capacity` whose watcher tells what the test writes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.notes: list[str] = []
        self.file = folder / "told"
        self.file.touch()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        program = [sys.executable, "-S", "-c", _WATCHER.format(path=str(self.file))]
        monkeypatch.setattr(module, "program_of", lambda name: program)
        monkeypatch.setattr(module, "_AGAIN_S", 0.1)
        monkeypatch.setattr(module, "_END_S", 0.1)
        self.job = spec(folder, "head:6379")
        self.capacity = Capacity(self.job, self.notes.append)

    def tell(self, *answers: dict[str, object] | str) -> None:
        with self.file.open("a") as file:
            file.writelines(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in answers)

    def next(self) -> list[HostSlots]:
        deadline = time.monotonic() + 20
        while (nodes := self.capacity.poll()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return list(nodes)

    def wait_for_problem(self) -> str:
        deadline = time.monotonic() + 20
        while not self.capacity.problem:
            assert self.capacity.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        return self.capacity.problem


def spec(folder: Path, address: str, least: int = 1, most: int = 4) -> JobSpec:
    cluster = RaySpec((), "", str(folder), ray_address=address)
    elastic = ElasticSpec(least, most)
    return JobSpec(most, ("train.py",), folder, backend="ray", hosts=cluster, elastic=elastic)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """A capacity with a watcher that has told nothing."""
    made = Watched(tmp_path, monkeypatch)
    yield made
    made.capacity.close()


def test_two_answers_must_agree(watched: Watched) -> None:
    watched.tell(FEWER, NODES, FEWER, NODES, NODES)
    assert watched.next() == [A1, B2] and watched.capacity.is_current and not watched.notes


def test_what_was_told_before_the_end_of_an_attempt_does_not_count(watched: Watched) -> None:
    watched.tell(NODES, NODES)
    watched.next()
    watched.capacity.renew()
    assert not watched.capacity.is_current
    watched.tell(NODES, FEWER, FEWER)  # the first may be from before
    assert watched.next() == [A1] and watched.capacity.is_current


def test_a_cluster_that_does_not_answer(watched: Watched) -> None:
    watched.tell(REFUSED)
    assert "must be the address of a running Ray cluster. Received: head:6379: no answer" in watched.wait_for_problem()
    assert not watched.notes, "nothing has begun: it is the error of the command"


def test_a_watcher_that_dies_is_started_again(watched: Watched) -> None:
    watched.tell(NODES, NODES)
    watched.next()
    watched.tell("end")
    assert "Received: exit code 1." in watched.wait_for_problem() and "no more" in watched.capacity.problem
    watched.file.write_text("")
    watched.tell(NODES, NODES)
    assert watched.next() == [A1, B2] and not watched.capacity.problem
    first, last = watched.notes
    assert "the room of the Ray cluster head:6379 stays as it was" in first and "tells its room again" in last


def test_an_attempt_uses_the_nodes_with_room(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Capacity", lambda job, note: watched.capacity)
    room = Room(watched.job, watched.notes.append)
    assert not room.is_fixed
    watched.tell({"is": "nodes", "nodes": [["a/1", 1], ["b/2", 2], ["c/3", 0]]}, *[{**NODES}] * 3)
    room.require_hosts(lambda: False)
    job = room.job_now()
    assert job.world_size == 3 and isinstance(job.hosts, RaySpec) and job.hosts.nodes == ("a/1", "b/2")
    room.settle(("b/2", "b/2", "a/1"))
    assert room.tells_life and not room.is_urgent()
    watched.tell(FEWER, FEWER)
    while not room.is_urgent():
        room.poll()
    room.close()


def test_a_cluster_of_its_own_has_the_room_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdistkit.launcher.ray.cluster.available_cores", lambda: 3)
    room = Room(spec(tmp_path, "local"), print)
    job = room.job_now()
    assert room.is_fixed and job.world_size == 3 and isinstance(job.hosts, RaySpec) and job.hosts.nodes is None
    with pytest.raises(OptionError, match=r"at most 3, the number of slots.*(?s:.*)--cpus-per-worker 0.5"):
        Room(spec(tmp_path, "local", least=4), print)


def test_a_notice_names_a_host_of_nodes() -> None:
    assert _named("node2, other", ["node1/3f2a9c01", "node2/11111111"]) == {"node2/11111111"}


def test_an_attempt_whose_room_was_taken_is_planned_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Capacity", lambda job, note: watched.capacity)
    tried: list[int] = []

    def prepare(job: JobSpec, attempt: int, should_stop: object) -> Prepared:
        tried.append(job.world_size)
        if len(tried) == 1:
            watched.tell(*[FEWER] * 3)
            raise NoRoomError("it is taken")
        return Prepared((), nodes=("a/1",))

    monkeypatch.setattr(changes, "prepare_attempt", prepare)
    watched.tell(*[NODES] * 3)
    job, prepared = changes.Changes(watched.job, watched.notes.append).prepare(0)
    assert tried == [3, 1] and job.world_size == 1 and prepared.nodes == ("a/1",)
    assert watched.notes == ["tfdistkit: it is taken"]


def test_the_time_for_room_is_limited(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Capacity", lambda job, note: watched.capacity)

    def prepare(job: JobSpec, attempt: int, should_stop: object) -> Prepared:
        time.sleep(0.1)
        raise NoRoomError("it is taken")

    monkeypatch.setattr(changes, "prepare_attempt", prepare)
    watched.tell(*[NODES] * 3)
    job = replace(watched.job, elastic=ElasticSpec(1, 4, wait_s=0.05))
    with pytest.raises(NoRoomError):
        changes.Changes(job, watched.notes.append).prepare(0)
