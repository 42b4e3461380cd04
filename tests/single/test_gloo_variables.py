"""The variables of Gloo's ranks on several hosts, and their network interface."""

from __future__ import annotations

import socket

import pytest

from tfdistkit.cluster import ClusterSpec, TaskSpec
from tfdistkit.cluster.environments.horovod import gloo_variables
from tfdistkit.cluster.routes import interface_of, own_ip_towards
from tfdistkit.cluster.spec import local_place

# Three ranks on a, two on b, one on c, in an order that no scheduler would choose.
HOSTS = ("a", "b", "a", "c", "b", "a")
# For each rank: host, local rank, local size, cross rank and cross size.
PLACES = (
    ("a", 0, 3, 0, 3),
    ("b", 0, 2, 1, 3),
    ("a", 1, 3, 0, 2),
    ("c", 0, 1, 2, 3),
    ("b", 1, 2, 1, 2),
    ("a", 2, 3, 0, 1),
)


@pytest.mark.parametrize("rank", range(6))
def test_ranks_on_several_hosts(rank: int) -> None:
    addresses = {"worker": tuple(f"{host}:{5000 + number}" for number, host in enumerate(HOSTS))}
    task = TaskSpec("worker", rank)
    told = gloo_variables(ClusterSpec(addresses, task, *local_place(addresses, task)))
    assert (told["HOROVOD_RANK"], told["HOROVOD_SIZE"]) == (str(rank), "6")
    names = ("HOSTNAME", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    assert tuple(told[f"HOROVOD_{name}"] for name in names) == tuple(map(str, PLACES[rank]))
    assert told["HOROVOD_CONTROLLER"] == told["HOROVOD_CPU_OPERATIONS"] == "gloo"


def test_a_host_with_two_names() -> None:
    addresses = {"worker": ("localhost:1", "127.0.0.1:2")}
    specs = [ClusterSpec(addresses, TaskSpec("worker", rank), rank, 2) for rank in (0, 1)]
    assert {gloo_variables(spec)["HOROVOD_HOSTNAME"] for spec in specs} == {"localhost"}


def test_the_interface_to_this_machine() -> None:
    assert own_ip_towards("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") in [name for _, name in socket.if_nameindex()]


def test_no_route() -> None:
    assert own_ip_towards("no-such-host.invalid") is None
    assert interface_of("203.0.113.77") is None
