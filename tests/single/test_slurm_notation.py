"""SLURM's short lists, expanded as by `scontrol show hostnames`."""

from __future__ import annotations

import time

import pytest
from patience import longer

from tfdistkit.cluster.environments.slurm_notation import expand_counts, expand_hosts
from tfdistkit.errors import ClusterConfigError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1 n2"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("node[01-03,07],login1", "node01 node02 node03 node07 login1"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[2,10]", "n2 n10"),
        ("n[10,2]", "n10 n2"),
        ("gpu[1-2]x[1-3]", "gpu1x1 gpu1x2 gpu1x3 gpu2x1 gpu2x2 gpu2x3"),
        ("node[01-03,07],gpu[1-2]x[1-3]",
         "node01 node02 node03 node07 gpu1x1 gpu1x2 gpu1x3 gpu2x1 gpu2x2 gpu2x3"),
        ("r[1-2]-ib.cluster", "r1-ib.cluster r2-ib.cluster"),
        ("rack1n[1,3],rack2n[1-2],rack10n5", "rack1n1 rack1n3 rack2n1 rack2n2 rack10n5"),
        ("10.0.0.[9-10]", "10.0.0.9 10.0.0.10"),
        ("n1,n1,n2", "n1 n1 n2"),
        ("a-b[0-1]", "a-b0 a-b1"),
    ],
)  # fmt: skip
def test_hosts(text: str, hosts: str) -> None:
    assert expand_hosts(text, "X") == tuple(hosts.split())


def test_as_many_hosts_as_slurm_allows() -> None:
    hosts = expand_hosts("n[00001-65536]", "X")
    assert (len(hosts), hosts[0], hosts[-1]) == (65536, "n00001", "n65536")


@pytest.mark.parametrize(
    "text",
    ["", ",", "n1,", ",n1", "n1,,n2", "n[1-2", "n1-2]", "n[]", "n[1-]", "n[-2]", "n[3-1]", "n[1-2-3]", "n[a-b]",
     "n[1,]", "n[[1-2]]", "n 1", "n[1 - 2]", "n[1-2] ", "n[1-99999999999999999999]", "n[1-65537]",
     "n[1-1000]x[1-1000]", "n[1-40000],m[1-40000]", f"n[{'9' * 5000}]"],
)  # fmt: skip
def test_invalid_hosts(text: str) -> None:
    with pytest.raises(
        ClusterConfigError, match="`SLURM_STEP_NODELIST` must be a list of hosts.*Received: SLURM_STEP_NOD"
    ):
        expand_hosts(text, "SLURM_STEP_NODELIST")


def test_an_invalid_list_is_refused_quickly() -> None:
    """Nested repetition in the pattern would take exponential time."""
    start = time.monotonic()
    with pytest.raises(ClusterConfigError) as caught:
        expand_hosts("n" * 100_000 + "[", "X")
    assert time.monotonic() - start < longer(20)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "counts"),
    [("3", [3]), ("3,1", [3, 1]), ("2(x2)", [2, 2]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2),1,0", [1, 2, 2, 1, 0])],
)
def test_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text, "X") == tuple(counts)


@pytest.mark.parametrize("text", ["", "2,", "x", "2(x", "2(x0)", "2(3)", "-1", "2x3", "1(x99999999999)", "9" * 5000])
def test_invalid_counts(text: str) -> None:
    with pytest.raises(ClusterConfigError, match="`SLURM_STEP_TASKS_PER_NODE` must list the number of tasks"):
        expand_counts(text, "SLURM_STEP_TASKS_PER_NODE")
