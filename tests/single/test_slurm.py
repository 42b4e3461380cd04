"""The cluster of a SLURM step: all tasks compute the same addresses, and each checks its own host."""

from __future__ import annotations

import socket

import pytest
from slurm_steps import BATCH, JOB, SALLOC, STEP, put, step

import tfdistkit
from tfdistkit import env
from tfdistkit.cluster import ClusterSpec, check_own_address, detect_cluster, split_address
from tfdistkit.cluster.environments.slurm_ports import first_port
from tfdistkit.errors import ClusterConfigError

FIRST_PORT = first_port(JOB, STEP, 1)

# name: (node of each task, SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE, SLURM's nodes in order, more variables)
STEPS: dict[str, tuple[str, str, str, str, dict[str, str]]] = {
    "-n1": ("n1", "n1", "1", "n1", {}),
    "-N2 -n2": ("n1 n2", "n[1-2]", "1(x2)", "n1 n2", {}),
    "-N2 --ntasks-per-node=2": ("n1 n1 n2 n2", "n[1-2]", "2(x2)", "n1 n2", {}),
    "-N2 -n4": ("n1 n1 n1 n2", "n[1-2]", "3,1", "n1 n2", {}),
    "-n7 over four nodes": ("a1 a1 a2 a2 a3 a3 b1", "a[1-3],b1", "2(x3),1", "a1 a2 a3 b1", {}),
    "n2 before n10": ("n2 n10", "n[2,10]", "1(x2)", "n2 n10", {}),
    "n10 before n2": ("n10 n2", "n[10,2]", "1(x2)", "n10 n2", {}),
    "-m block": ("n1 n1 n2 n2", "n[1-2]", "2(x2)", "n1 n2", {"SLURM_DISTRIBUTION": "block"}),
    "-m block:cyclic": ("n1 n1 n2 n2", "n[1-2]", "2(x2)", "n1 n2", {"SLURM_DISTRIBUTION": "block:cyclic"}),
    "-m cyclic": ("n1 n2 n1 n2", "n[1-2]", "2(x2)", "n1 n2", {"SLURM_DISTRIBUTION": "cyclic"}),
    "-m cyclic:block,pack": ("n1 n2 n1 n2", "n[1-2]", "2(x2)", "n1 n2", {"SLURM_DISTRIBUTION": "cyclic:block,pack"}),
    # The example in SLURM's own source: 4, 2, 4, 2 processors.
    "-m cyclic, uneven": ("n1 n2 n3 n4 n1 n2 n3 n4 n1 n3 n1 n3", "n[1-4]", "4,2,4,2", "n1 n2 n3 n4",
                          {"SLURM_DISTRIBUTION": "cyclic"}),
    "-m plane=2": ("n1 n1 n2 n2 n1 n1 n2", "n[1-2]", "4,3", "n1 n2",
                   {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}),
    "-m plane=4, three nodes": ("n1 n1 n1 n1 n2 n2 n2 n2 n3 n3 n3 n3 n1 n1 n1 n1 n2 n2 n2 n2 n3", "n[1-3]", "8(x2),5",
                                "n1 n2 n3", {"SLURM_DISTRIBUTION": "plane=4"}),
    "-m arbitrary": ("n3 n1 n3 n2", "n[1-3]", "1(x2),2", "n1 n2 n3",
                     {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_ARBITRARY_NODELIST": "n3,n1,n3,n2"}),
    "--mpi=pmix": ("n1 n2", "n[1-2]", "1(x2)", "n1 n2", {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.4711.2"}),
}  # fmt: skip


def read(monkeypatch: pytest.MonkeyPatch, tasks: list[dict[str, str]]) -> list[ClusterSpec]:
    specs = []
    for variables in tasks:
        put(monkeypatch, variables)
        specs.append(detect_cluster())
    return specs


@pytest.mark.parametrize("name", STEPS)
def test_each_task_knows_all_addresses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    hosts, nodelist, counts, nodes, more = STEPS[name]
    expected = hosts.split()
    tasks = step(expected, nodelist, counts, nodes.split(), **more)
    specs = read(monkeypatch, tasks)
    for rank, (spec, variables) in enumerate(zip(specs, tasks, strict=True)):
        assert (spec.rank, spec.world_size, spec.is_chief) == (rank, len(expected), rank == 0)
        assert spec.addresses == specs[0].addresses and spec.has_addresses and spec.is_complete
        assert [split_address(address)[0] for address in spec.workers] == expected
        host, port = split_address(spec.address or "")
        assert host == variables["SLURMD_NODENAME"]
        assert port == FIRST_PORT + int(variables["SLURM_LOCALID"])
        assert (spec.local_rank, spec.local_world_size) == (
            int(variables["SLURM_LOCALID"]),
            expected.count(expected[rank]),
        )
        assert spec.source == "SLURM's variables"
    assert len(set(specs[0].workers)) == len(expected), "no two tasks have one address"


@pytest.mark.parametrize("variables", [BATCH, SALLOC], ids=["sbatch", "salloc"])
def test_a_job_without_a_step_is_a_single_process(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    put(monkeypatch, variables)
    assert detect_cluster() == ClusterSpec()
    assert (tfdistkit.rank(), tfdistkit.world_size(), tfdistkit.is_chief()) == (0, 1, True)


def test_the_shell_of_an_interactive_step_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`salloc` with LaunchParameters=use_interactive_step, `srun --pty bash`: a step with one task."""
    put(monkeypatch, step(["n1"], "n1", "1", SLURM_STEP_ID=str(0xFFFFFFFA))[0])
    spec = detect_cluster()
    assert (spec.rank, spec.world_size, spec.local_rank, spec.local_world_size, spec.is_chief) == (0, 1, 0, 1, True)


def test_parameter_servers_are_the_last_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["n1", "n1", "n1", "n2", "n2", "n2"]
    specs = read(monkeypatch, step(hosts, "n[1-2]", "3(x2)", TFDISTKIT_PS="2"))
    port = FIRST_PORT
    assert specs[0].addresses == {
        "chief": (f"n1:{port}",),
        "worker": (f"n1:{port + 1}", f"n1:{port + 2}", f"n2:{port}"),
        "ps": (f"n2:{port + 1}", f"n2:{port + 2}"),
    }
    assert [(spec.task.role, spec.task.index) for spec in specs] == [
        ("chief", 0), ("worker", 0), ("worker", 1), ("worker", 2), ("ps", 0), ("ps", 1),
    ]  # fmt: skip
    assert all(spec.addresses == specs[0].addresses for spec in specs)
    assert [spec.is_chief for spec in specs] == [True] + [False] * 5
    assert [spec.rank for spec in specs[:4]] == [0, 0, 1, 2]
    assert {spec.world_size for spec in specs} == {3}
    # The local rank selects the GPU, so the coordinator does not count.
    assert [(spec.local_rank, spec.local_world_size) for spec in specs[1:4]] == [(0, 2), (1, 2), (0, 1)]


@pytest.mark.parametrize("servers", ["", "0"])
def test_no_parameter_servers(monkeypatch: pytest.MonkeyPatch, servers: str) -> None:
    assert list(read(monkeypatch, step(["n1"], "n1", "1", TFDISTKIT_PS=servers))[0].addresses) == ["worker"]


def test_a_heterogeneous_step_in_the_order_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun -n2 A : -n1 B, as one world. SLURM counts local ids within a component."""
    tasks = step(["n1", "n1", "n2"], "n[1-2]", "2,1", SLURM_HET_SIZE="2")
    assert [spec.address for spec in read(monkeypatch, tasks)] == [
        f"n1:{FIRST_PORT}", f"n1:{FIRST_PORT + 1}", f"n2:{FIRST_PORT}",
    ]  # fmt: skip
    # Two components that share a node: the local id of the second one's task starts from 0 again.
    shared = step(["n1", "n1", "n1"], "n1", "3", SLURM_HET_SIZE="2")
    shared[2] |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "2"}
    assert [(spec.address, spec.local_rank) for spec in read(monkeypatch, shared)] == [
        (f"n1:{FIRST_PORT + place}", place) for place in range(3)
    ]


def test_a_heterogeneous_step_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM sorts the nodes of all components into one list, so their components are unknown."""
    tasks = step(["n2", "n1"], "n[1-2]", "1(x2)", nodes=["n1", "n2"], SLURM_HET_SIZE="2")
    put(monkeypatch, tasks[0])
    with pytest.raises(ClusterConfigError, match="SLURMD_NODENAME n2.*Expected: SLURMD_NODENAME n1") as caught:
        detect_cluster()
    assert "SLURM_HET_SIZE=2" in str(caught.value) and "heterogeneous" in str(caught.value)


TWO_BY_TWO = step(["n1", "n1", "n2", "n2"], "n[1-2]", "2(x2)")


@pytest.mark.parametrize(
    ("rank", "changes", "words"),
    [
        (1, {"SLURM_PROCID": None}, "must be complete.*SLURM_JOB_ID=4711.*no SLURM_PROCID"),
        (1, {"SLURM_STEP_NODELIST": None, "SLURM_NODEID": None}, "no SLURM_NODEID and no SLURM_STEP_NODELIST"),
        (1, {"SLURM_STEP_ID": None}, "no SLURM_STEP_ID"),
        (1, {"SLURM_PROCID": "x"}, "`SLURM_PROCID` must be an integer"),
        (1, {"SLURM_PROCID": "4"}, "`SLURM_PROCID` must be >= 0 and below `SLURM_STEP_NUM_TASKS`=4. Received: .*=4"),
        (1, {"SLURM_PROCID": "-1"}, "`SLURM_PROCID` must be >= 0 and below"),
        (1, {"SLURM_STEP_NUM_TASKS": "0"}, "`SLURM_STEP_NUM_TASKS` must be >= 1"),
        (1, {"SLURM_STEP_NUM_TASKS": "5"}, "`SLURM_STEP_TASKS_PER_NODE` must add up to.*=5"),
        (1, {"SLURM_STEP_NODELIST": "n[1-3]"}, "`SLURM_STEP_TASKS_PER_NODE` must have .* each of the 3 nodes"),
        (1, {"SLURM_STEP_NODELIST": "n[1-"}, "`SLURM_STEP_NODELIST` must be a list of hosts"),
        (1, {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "must list the number of tasks"),
        (1, {"SLURM_DISTRIBUTION": "spiral"}, "`SLURM_DISTRIBUTION` must be block, cyclic, plane or arbitrary"),
        (1, {"SLURM_DISTRIBUTION": "plane"}, "SLURM_DIST_PLANESIZE=None.*srun -m plane=SIZE"),
        (1, {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "0"}, "SLURM_DIST_PLANESIZE=0"),
        (1, {"SLURM_DISTRIBUTION": "arbitrary"}, "`SLURM_ARBITRARY_NODELIST` must list.*0 nodes, for 4 tasks"),
        (1, {"SLURM_DISTRIBUTION": "arbitrary", "SLURM_ARBITRARY_NODELIST": "n[1-2]"}, "2 nodes, for 4 tasks"),
        # The step is cyclic, but no variable says so: tasks 1 and 2 detect it.
        (1, {"SLURMD_NODENAME": "n2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_GTIDS": "1,3"},
         "contradict.*SLURM_PROCID=1 with SLURMD_NODENAME n2. Expected: SLURMD_NODENAME n1, after SLURM_STEP_NUM"),
        (1, {"SLURM_NODEID": "1"}, "SLURM_NODEID=1, the node n2. Expected: SLURM_NODEID=1, the node n1"),
        (1, {"SLURM_NODEID": "7"}, "SLURM_NODEID=7, the node None"),
        (1, {"SLURM_LOCALID": "0"}, "SLURM_LOCALID 0. Expected: SLURM_LOCALID 1"),
        (0, {"SLURM_GTIDS": "0,2"}, "SLURM_GTIDS 0,2. Expected: SLURM_GTIDS 0,1"),
        (0, {"SLURM_GTIDS": "0,2", "SLURM_OVERCOMMIT": "1"}, "-m block.*overcommitted"),
        # `sbatch` in a task of a step: its variables reach the batch script of another job.
        (0, BATCH, "SLURM_GTIDS 0. Expected: SLURM_GTIDS 0,1.*sbatch --export=NONE.*TFDISTKIT_CLUSTER=single"),
        (1, {env.PS: "3"}, "`TFDISTKIT_PS` must leave a task.*TFDISTKIT_PS=3, SLURM_STEP_NUM_TASKS=4.*srun -n 5"),
        (1, {env.PS: "-1"}, "`TFDISTKIT_PS` must leave a task.*0 to 2 parameter servers"),
        (1, {env.PS: "two"}, "`TFDISTKIT_PS` must be an integer"),
        (1, {env.PORT: "70000"}, "`TFDISTKIT_PORT` must be from 1 to 65534, for 2 tasks"),
        (1, {env.PORT: "0"}, "`TFDISTKIT_PORT` must be from 1"),
    ],
)  # fmt: skip
def test_error_messages(monkeypatch: pytest.MonkeyPatch, rank: int, changes: dict[str, str | None], words: str) -> None:
    put(monkeypatch, dict(TWO_BY_TWO[rank]), changes)
    with pytest.raises(ClusterConfigError, match=f"(?s){words}"):
        detect_cluster()


def test_too_few_tasks_for_parameter_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, step(["n1", "n1"], "n1", "2", TFDISTKIT_PS="1")[0])
    with pytest.raises(ClusterConfigError, match="3 tasks or more: a coordinator, a worker and a parameter server"):
        detect_cluster()


def test_uneven_overcommitment_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 cyclic tasks over 4 and 2 processors: when the second node is full, SLURM first fills the other one."""
    hosts = ["n1", "n2", "n1", "n2", "n1", "n1", "n1", "n2", "n1", "n2"]
    tasks = step(hosts, "n[1-2]", "6,4", SLURM_DISTRIBUTION="cyclic", SLURM_OVERCOMMIT="1")
    for variables in tasks:
        put(monkeypatch, variables)
        with pytest.raises(ClusterConfigError, match="overcommitted"):
            detect_cluster()


# Ports.


def test_the_first_port_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, TWO_BY_TWO[0], {env.PORT: "5000"})
    assert detect_cluster().workers == ("n1:5000", "n1:5001", "n2:5000", "n2:5001")


def test_steps_that_may_share_a_host_have_different_ports() -> None:
    tasks = 128
    near = [(job, number) for job in range(817, 817 + 17) for number in range(9)]
    one_job = [(817, number) for number in range(100)]
    for steps in (near, one_job):
        first = sorted(first_port(job, number, tasks) for job, number in steps)
        assert all(low + tasks <= high for low, high in zip(first, first[1:], strict=False))


def test_ports_stay_below_those_of_outgoing_connections() -> None:
    found = [first_port(job, number, 1) for job in (1, 4711, 67_108_863, 2**32) for number in (0, 9, 0xFFFFFFFA)]
    assert all(10_000 <= port <= 32_768 - 1024 for port in found)
    assert len(set(found)) == len(found)


def test_fixes_for_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.KUBERNETES, raising=False)
    put(monkeypatch, step(["n1.invalid", "n2.invalid"], "n[1-2].invalid", "1(x2)")[0])
    with pytest.raises(ClusterConfigError, match="(?s)does not resolve.*Enter the names of SLURM's nodes in the DNS"):
        check_own_address(detect_cluster())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        put(monkeypatch, step(["127.0.0.1", "n2"], "127.0.0.1,n2", "1(x2)", TFDISTKIT_PORT=port)[0])
        with pytest.raises(ClusterConfigError, match=f"(?s)Port {port} .*set TFDISTKIT_PORT to another first port"):
            check_own_address(detect_cluster())
