"""ClusterSpec: ranks, the chief, local ranks; and addresses as text."""

from __future__ import annotations

import dataclasses

import pytest

from tfdistkit.cluster import ClusterSpec, TaskSpec, host_key, join_address, split_address
from tfdistkit.cluster.spec import local_place
from tfdistkit.errors import ClusterConfigError

CLUSTER = {"chief": ("a:1",), "worker": ("a:2", "b:1")}
WITH_SERVERS = {**CLUSTER, "ps": ("a:3", "c:1")}


def test_a_single_process() -> None:
    spec = ClusterSpec()
    assert (spec.rank, spec.world_size, spec.is_chief, spec.address, spec.workers) == (0, 1, True, None, ())
    assert spec.is_complete


@pytest.mark.parametrize(
    ("role", "index", "rank", "address"), [("chief", 0, 0, "a:1"), ("worker", 0, 1, "a:2"), ("worker", 1, 2, "b:1")]
)
def test_ranks(role: str, index: int, rank: int, address: str) -> None:
    spec = ClusterSpec(CLUSTER, TaskSpec(role, index))
    assert (spec.rank, spec.world_size, spec.address) == (rank, 3, address)
    assert spec.workers[spec.rank] == address
    assert spec.is_chief == (rank == 0)
    assert not spec.has_servers and not spec.is_coordinator


@pytest.mark.parametrize(
    ("role", "index", "rank", "is_chief"), [("chief", 0, 0, True), ("worker", 0, 0, False), ("worker", 1, 1, False)]
)
def test_with_parameter_servers_only_the_workers_count(role: str, index: int, rank: int, is_chief: bool) -> None:
    spec = ClusterSpec(WITH_SERVERS, TaskSpec(role, index))
    assert (spec.rank, spec.world_size, spec.workers) == (rank, 2, ("a:2", "b:1"))
    assert (spec.is_chief, spec.is_coordinator, spec.has_servers) == (is_chief, is_chief, True)
    assert spec.is_training and spec.is_complete


def test_a_parameter_server_has_an_address_but_no_rank() -> None:
    spec = ClusterSpec(WITH_SERVERS, TaskSpec("ps", 1))
    assert (spec.address, spec.world_size) == ("c:1", 2)
    assert not spec.is_training
    assert not spec.is_chief
    with pytest.raises(ClusterConfigError, match="'ps'.*\n.*tfdistkit.strategy\\(\"parameter_server\"\\)"):
        _ = spec.rank


def test_an_address_that_is_not_known_makes_a_cluster_incomplete() -> None:
    for role in ("chief", "worker", "ps"):
        assert not ClusterSpec({**WITH_SERVERS, role: ("", "b:9")}, TaskSpec("worker", 1)).is_complete
    assert ClusterSpec({**WITH_SERVERS, "evaluator": ("",)}, TaskSpec("worker", 1)).is_complete


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ClusterSpec().local_rank = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (TaskSpec("chief", 0), (0, 2)),
        (TaskSpec("worker", 0), (1, 2)),
        (TaskSpec("worker", 1), (0, 1)),
    ],
)
def test_local_place(task: TaskSpec, expected: tuple[int, int]) -> None:
    assert local_place(CLUSTER, task) == expected


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (TaskSpec("chief", 0), (0, 1)),
        (TaskSpec("worker", 0), (0, 2)),
        (TaskSpec("worker", 2), (1, 2)),
        (TaskSpec("ps", 0), (0, 1)),
        (TaskSpec("evaluator", 0), (0, 1)),
    ],
)
def test_only_replicas_count_on_a_host(task: TaskSpec, expected: tuple[int, int]) -> None:
    addresses = {"chief": ("a:1",), "worker": ("a:2", "b:1", "a:4"), "ps": ("a:3",)}
    assert local_place(addresses, task) == expected


def test_local_place_knows_the_names_of_this_machine() -> None:
    addresses = {"worker": ("localhost:1", "127.0.0.1:2", "[::1]:3")}
    assert local_place(addresses, TaskSpec("worker", 2)) == (2, 3)


@pytest.mark.parametrize("address", ["h1:1", "10.0.0.1:65535", "[::1]:1234", "[fe80::1%eth0]:1"])
def test_addresses_both_ways(address: str) -> None:
    assert join_address(*split_address(address)) == address


def test_hosts_compare_without_case() -> None:
    assert host_key("Node1:1") == host_key("node1:2")
    assert host_key("node1:1") != host_key("node2:1")
