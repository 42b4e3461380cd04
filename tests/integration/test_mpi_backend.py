"""`tfdistkit run --backend mpi -H ...` with a real Open MPI, on two hosts that are reached by ssh."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from equal_training import ENVIRONMENT, TRAIN, check_equal, read_results
from net_hosts import NetHosts
from ssh_jobs import PATHS, run_on_hosts, ssh_job

# In MPI's world, as MPI itself says; by functions whose arguments are plain in Open MPI's ABI.
TELL = """
    import ctypes, json, os, sys
    mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
    world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
    assert mpi.MPI_Init(None, None) == 0
    rank, size, total = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    mpi.MPI_Comm_rank(world, ctypes.byref(rank))
    mpi.MPI_Comm_size(world, ctypes.byref(size))
    integer, plus = (ctypes.byref(ctypes.c_char.in_dll(mpi, name)) for name in ("ompi_mpi_int", "ompi_mpi_op_sum"))
    mine = ctypes.c_int(10 + rank.value)
    mpi.MPI_Allreduce(ctypes.byref(mine), ctypes.byref(total), 1, integer, plus, world)
    mpi.MPI_Finalize()
    told = [os.uname().nodename, rank.value, size.value, total.value, os.environ["TFDISTKIT_LOCAL_RANK"]]
    told += [os.environ.get("OMPI_MCA_btl"), os.environ.get("OMPI_MCA_btl_tcp_if_include")]
    os.write(1, (json.dumps(told) + chr(10)).encode())
"""

SLEEP = """
    import os, time
    os.write(1, f"up at {os.uname().nodename} {os.getpid()}\\n".encode())
    time.sleep(600)
"""


@pytest.fixture
def on_hosts(hosts: NetHosts, mpirun: list[str]) -> NetHosts:
    """Hosts that mpirun comes to."""
    return hosts


def test_mpis_world(on_hosts: NetHosts) -> None:
    script = on_hosts.write("script.py", TELL)
    words = ["--backend", "mpi", "-H", "h1:2,h2:1", "--mpi-args=--mca btl tcp,self --mca pml ob1", str(script)]
    ended = run_on_hosts(on_hosts, *words)
    assert ended.code == 0, ended.stderr
    told = dict(line.split("] ", 1) for line in ended.stdout.splitlines())
    expected = {0: ("h1", "0"), 1: ("h1", "1"), 2: ("h2", "0")}
    assert {rank: json.loads(told[f"[{rank}"]) for rank in expected} == {
        rank: [host, rank, 3, 33, local, "tcp,self", "eth0"] for rank, (host, local) in expected.items()
    }


def test_roles_have_a_place_in_mpis_world(on_hosts: NetHosts) -> None:
    """MPI counts host by host, while the servers of the first host come after the workers of the second."""
    script = on_hosts.write(
        "script.py",
        TELL
        + """
    print(json.dumps(["TASK", json.loads(os.environ["TF_CONFIG"])["task"], os.environ.get("HOROVOD_RANK")]))
    """,
    )
    words = ["--backend", "mpi", "-H", "h1:1,h2:1", "--ps", "2", "--mpi-args=--mca btl tcp,self --mca pml ob1"]
    ended = run_on_hosts(on_hosts, *words, str(script), HOROVOD_RANK="0")
    assert ended.code == 0, ended.stderr
    told: dict[str, list[Any]] = {}
    for line in ended.stdout.splitlines():
        name, _, text = line[1:].partition("] ")
        told.setdefault(name, []).append(json.loads(text))
    total = sum(10 + rank for rank in range(5))
    for name, host, rank in [("chief", "h1", 0), ("worker 0", "h1", 1), ("ps 0", "h1", 2)] + [
        ("worker 1", "h2", 3),
        ("ps 1", "h2", 4),
    ]:
        role, _, index = name.partition(" ")
        world, task = told[name]
        assert world[:4] == [host, rank, 5, total]
        assert task == ["TASK", {"type": role, "index": int(index or 0)}, None]


def test_the_first_failure_is_reported_and_no_process_is_left(on_hosts: NetHosts) -> None:
    script = on_hosts.write("script.py", SLEEP)
    with ssh_job(on_hosts, "--backend", "mpi", "-H", "h1:1,h2:1", str(script)) as running:
        running.wait_for("[0] up at", "[1] up at")
        os.kill(running.pid_of(1), signal.SIGKILL)
        ended = running.end()
        assert ended.code == 137, ended.stderr
        assert "rank 1 was killed by SIGKILL (host h2" in ended.stderr
        running.nothing_is_left()


def test_a_launcher_that_is_killed_leaves_nothing(on_hosts: NetHosts) -> None:
    script = on_hosts.write("script.py", SLEEP)
    with ssh_job(on_hosts, "--backend", "mpi", "-H", "h1:1,h2:1", str(script)) as running:
        running.wait_for("[0] up at", "[1] up at")
        running.process.kill()
        running.process.wait(timeout=30)
        running.nothing_is_left(deadline_s=30)


def test_errors_of_mpirun_are_shown(on_hosts: NetHosts) -> None:
    script = on_hosts.write("script.py", SLEEP)
    ended = run_on_hosts(on_hosts, "--backend", "mpi", "-H", "h1:1,h2:1", "--mpi-args=--no-such-option", str(script))
    assert ended.code == 2
    assert "mpirun did not start 2 ranks." in ended.stderr and "no-such-option" in ended.stderr


@pytest.mark.tensorflow
@pytest.mark.horovod
def test_the_training_of_one_process(on_hosts: NetHosts, alone: dict[str, Any], horovod_with_mpi: Path) -> None:
    script = on_hosts.write("script.py", TRAIN)
    path = os.pathsep.join([str(horovod_with_mpi), *PATHS.split(os.pathsep)])
    variables = {**ENVIRONMENT, "PYTHONPATH": path}
    passed = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    words = ["--backend", "mpi", "-H", "h1:1,h2:1", *passed, str(script), "horovod"]
    ended = run_on_hosts(on_hosts, *words, deadline_s=240)
    assert ended.code == 0, ended.stderr
    check_equal(read_results(ended.stdout), alone, ["h1", "h2"], "HorovodStrategy")


@pytest.mark.tensorflow
def test_training_with_parameter_servers(on_hosts: NetHosts) -> None:
    """Nobody says which strategy: the roles do, and MPI's variables do not speak against them."""
    script = on_hosts.write(
        "script.py",
        TRAIN
        + """
    os.write(1, ("STEPS " + str(int(model.optimizer.iterations)) + chr(10)).encode())
    """,
    )
    passed = [word for name, value in ENVIRONMENT.items() for word in ("-x", f"{name}={value}")]
    words = ["--backend", "mpi", "-H", "h1:1,h2:1", "--ps", "1", *passed, str(script), "auto"]
    ended = run_on_hosts(on_hosts, *words, deadline_s=240)
    assert ended.code == 0, ended.stderr
    (result,) = read_results(ended.stdout)
    assert (result["host"], result["strategy"]) == ("h1", "ParameterServerStrategy")
    assert "[chief] STEPS 6\n" in ended.stdout and result["losses"][1] < result["losses"][0]
