"""Parsing of `-H` and `--hostfile`, and the placement of processes on hosts."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tfdistkit import env
from tfdistkit.cluster import from_tf_config
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import OptionError
from tfdistkit.launcher import JobSpec, plan_processes
from tfdistkit.launcher.hosts import HostsSpec, is_this_machine, parse_hosts, read_hostfile, spread
from tfdistkit.launcher.placement import Place
from tfdistkit.launcher.planning import hosts_of_tasks


def pairs(hosts: tuple[HostSlots, ...]) -> list[tuple[str, int]]:
    return [(one.host, one.slots) for one in hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1:4,node2:4", [("node1", 4), ("node2", 4)]),
        ("node1", [("node1", 1)]),
        (" node1 , node2:2 ", [("node1", 1), ("node2", 2)]),
        ("me@node1.cluster:2", [("me@node1.cluster", 2)]),
        ("10.0.0.1:8", [("10.0.0.1", 8)]),
        ("[fd00::1]:4,[fe80::1%eth0]", [("fd00::1", 4), ("fe80::1%eth0", 1)]),
        ("node1:1,node2:1,node1:2", [("node1", 3), ("node2", 1)]),
    ],
)
def test_hosts(text: str, expected: list[tuple[str, int]]) -> None:
    assert pairs(parse_hosts(text)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "node1,",
        "node1:0",
        "node1:-1",
        "node1:x",
        "node1:",
        ":4",
        "-oProxyCommand=x",
        "a b",
        "a;b",
        "$(x)",
        "a'b",
        "fd00::1",
        "[fd00::1",
        "@node",
        "-l@node",
        "node1:99999999",
        "nøde",
        "a/b",
        "a\nb",
        "node1:٣",
    ],
)
def test_invalid_hosts_are_rejected(text: str) -> None:
    with pytest.raises(OptionError, match=f"is not a host. Received: {re.escape(repr(text))}. Expected: HOST or HOST"):
        parse_hosts(text)


def test_hostfiles_of_horovodrun_and_open_mpi(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# ours\n\nnode1 slots=4\nnode2   slots=2 max_slots=8   # twice as large\nme@node3\nnode4:3\nnode1 cpu=1\n"
    )
    assert pairs(read_hostfile(path)) == [("node1", 5), ("node2", 2), ("me@node3", 1), ("node4", 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=0", "'slots=0' is not an option of a host. Received: 'node1 slots=0' in line 1 of"),
        ("node1\nnode2 slots=two", "'slots=two' is not an option of a host. Received: 'node2 slots=two' in line 2"),
        ("node1 slot=2", "'slot=2' is not an option of a host"),
        ("-oX=y slots=2", "'-oX=y' is not a host. Received: '-oX=y slots=2' in line 1 of"),
        ("# empty\n", "`--hostfile` must name at least one host"),
    ],
)
def test_invalid_hostfiles_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(OptionError, match=re.escape(message)):
        read_hostfile(path)


def test_a_missing_hostfile_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="`--hostfile` must be a readable text file"):
        read_hostfile(tmp_path / "hosts")


def test_this_machine_by_its_names() -> None:
    assert all(map(is_this_machine, ("localhost", "LOCALHOST", "127.0.0.1", "::1", socket.gethostname())))
    assert not is_this_machine("node1") and not is_this_machine("me@localhost")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssh_port": 0}, "`--ssh-port` must be an integer from 1 to 65535"),
        ({"ssh_port": 70000}, "`--ssh-port` must be an integer from 1 to 65535"),
        ({"start_timeout_s": 0.0}, "`--start-timeout` must be a positive number of seconds"),
        ({"start_timeout_s": float("nan")}, "`--start-timeout` must be a positive number of seconds"),
        ({"ssh_identity_file": "/no/such/key"}, "which does not exist"),
    ],
)
def test_invalid_host_options_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        HostsSpec(parse_hosts("a"), "python", "/", **change)


def test_workers_fill_the_hosts_in_order() -> None:
    slots = parse_hosts("a:2,b:3")
    assert spread(slots, 5) == [0, 0, 1, 1, 1] and spread(slots, 1) == [0]
    with pytest.raises(
        OptionError, match="must be at most 5, the number of slots. Received: -np 6, and 5 slots on a, b"
    ):
        spread(slots, 6)


def job(np: int, hosts: str, **options: object) -> JobSpec:
    spec = HostsSpec(parse_hosts(hosts), "/py", "/work")
    return JobSpec(np, ("train.py",), Path("/logs"), hosts=spec, **options)  # type: ignore[arg-type]


def test_placement_of_roles_on_hosts() -> None:
    assert hosts_of_tasks(job(3, "a:2,b:2")) == [0, 0, 1]
    # The coordinator is on the first host, the servers on those that have workers.
    assert hosts_of_tasks(job(3, "a:2,b:2,c:2", ps=3)) == [0, 0, 0, 1, 0, 1, 0]


def test_a_plan_for_hosts() -> None:
    places = [
        Place(7001, 8, "a", "10.0.0.1", "eth0", {env.OMP_THREADS: "3"}),
        Place(7002, 8, "a", "10.0.0.1", "eth0"),
        Place(7001, 4, "b", "10.0.0.2", "ib0"),
    ]
    processes = plan_processes(job(3, "a:2,b:2"), places, python="/py")
    assert [process.host for process in processes] == ["a", "a", "b"]
    assert {process.command for process in processes} == {("/py", "-m", "tfdistkit.worker", "train.py")}
    clusters = [from_tf_config(process.env[env.TF_CONFIG]) for process in processes]
    assert clusters[0].workers == ("10.0.0.1:7001", "10.0.0.1:7002", "10.0.0.2:7001")
    variables = [(env.LOCAL_RANK, env.LOCAL_WORLD_SIZE, env.INTRA_OP_THREADS, "NCCL_SOCKET_IFNAME")] * 3
    assert [[process.env[name] for name in names] for process, names in zip(processes, variables, strict=True)] == [
        ["0", "2", "4", "eth0"],
        ["1", "2", "4", "eth0"],
        ["0", "1", "4", "ib0"],
    ]
    assert env.OMP_THREADS not in processes[0].env and processes[1].env[env.OMP_THREADS] == "4"


def test_gloo_on_hosts() -> None:
    places = [Place(7001, 8, "a", "10.0.0.1", "eth0"), Place(7001, 8, "b", "10.0.0.2", "ib0")]
    processes = plan_processes(job(2, "a,b", backend="horovod"), places, python="/py")
    names = ("HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_GLOO_IFACE")
    assert [[process.env[name] for name in names] for process in processes] == [
        ["0", "0", "0", "2", "eth0"],
        ["1", "0", "1", "2", "ib0"],
    ]


def test_an_unknown_interface_is_left_to_gloo_and_nccl() -> None:
    """Such as the interface of an IPv6 address."""
    places = [Place(7001, 8, "a", "fd00::1", None), Place(7001, 8, "b", "fd00::2", None)]
    for process in plan_processes(job(2, "a,b", backend="horovod"), places, python="/py"):
        assert not {"HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"} & set(process.env)
