"""`mpirun python train.py` with a real Open MPI: the processes exchange their addresses; on one host and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from equal_training import ENVIRONMENT, check_equal, read_results, write_training
from slurm_cluster import SlurmCluster

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240

# The processes exchange their addresses, meet there, and MPI works afterwards.
TELL = """
    import ctypes, json, os, sys, time
    from tfdistkit.cluster import check_own_address, detect_cluster, exchange_facts, split_address
    from tfdistkit.cluster.environments.mpi_addresses import exchange_addresses
    found = detect_cluster()
    spec = exchange_addresses(found, 60)
    check_own_address(spec)
    met = [one["pid"] for one in exchange_facts(spec, {"pid": os.getpid()}, 60).facts]
    mpi = ctypes.CDLL("libmpi.so.40", ctypes.RTLD_GLOBAL)
    told = {
        "rank": spec.rank,
        "host": os.uname().nodename,
        "addresses": [list(split_address(address)) for address in spec.workers],
        "local": [spec.local_rank, spec.local_world_size],
        "pid": os.getpid(),
        "met": met,
        "mpi": [mpi.MPI_Init(None, None), mpi.MPI_Finalize()],
    }
    os.write(1, (json.dumps(told) + chr(10)).encode())
"""

# Rank 1 never asks for a strategy.
LATE = """
    import os, time
    from tfdistkit.cluster import detect_cluster
    from tfdistkit.cluster.environments.mpi_addresses import exchange_addresses
    if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        time.sleep(600)
    exchange_addresses(detect_cluster(), 0.5)
"""


@pytest.fixture
def two_hosts(slurm: SlurmCluster, mpirun: list[str], tmp_path: Path) -> list[str]:
    """An mpirun on the login host, with n1 and n2; it enters them by a script in the place of ssh."""
    agent = tmp_path / "agent.sh"
    cases = [f'{host.name}) exec {" ".join(host.prefix)} sh -c "$*" ;;' for host in slurm.hosts]
    agent.write_text("\n".join(["#!/bin/sh", "host=$1; shift", "case $host in", *cases, "esac", "exit 1", ""]))
    agent.chmod(0o755)
    return [*mpirun, "--mca", "plm_rsh_agent", str(agent), "--map-by", "slot"]


def write(folder: Path, script: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(script))
    return str(path)


def check_addresses(printed: str, hosts: list[str], ips: list[str]) -> None:
    tasks = sorted((json.loads(line) for line in printed.splitlines()), key=lambda task: int(task["rank"]))
    assert [task["host"] for task in tasks] == hosts
    assert [ip for ip, _ in tasks[0]["addresses"]] == ips
    assert len({tuple(address) for address in tasks[0]["addresses"]}) == len(tasks)
    for rank, task in enumerate(tasks):
        assert task["addresses"] == tasks[0]["addresses"]
        assert task["local"] == [hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])]
        assert task["met"] == [other["pid"] for other in tasks]
        assert task["mpi"] == [0, 0]


def test_one_host(mpirun: list[str], tmp_path: Path) -> None:
    command = [*mpirun, "-np", "3", sys.executable, write(tmp_path, TELL)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    check_addresses(ended.stdout, [os.uname().nodename] * 3, ["127.0.0.1"] * 3)


def test_a_process_that_does_not_come(mpirun: list[str], tmp_path: Path) -> None:
    command = [*mpirun, "-np", "2", sys.executable, write(tmp_path, LATE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode != 0
    assert "RendezvousError: All 2 processes must exchange their addresses through PMIx within 0.5 s" in ended.stderr


@pytest.mark.parametrize("interface", ["", "eth0", "10.77.0.0/24"])
def test_two_hosts(slurm: SlurmCluster, two_hosts: list[str], tmp_path: Path, interface: str) -> None:
    options = ["--mca", "btl_tcp_if_include", interface] if interface else []
    command = [*two_hosts, *options, "-np", "4", "-H", "n2:2,n1:2", sys.executable, write(tmp_path, TELL)]
    ended = slurm.run(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    check_addresses(ended.stdout, ["n2", "n2", "n1", "n1"], ["10.77.0.2", "10.77.0.2", "10.77.0.1", "10.77.0.1"])


def train(slurm: SlurmCluster, two_hosts: list[str], folder: Path, strategy: str, **more: str) -> list[dict[str, Any]]:
    tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0"]
    variables = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), **more}
    passed = [word for name in variables for word in ("-x", name)]
    script = [sys.executable, write_training(folder), strategy]
    command = [*two_hosts, *tcp, *passed, "-np", "2", "-H", "n1:1,n2:1", *script]
    ended = slurm.run(*command, cwd=folder, deadline_s=DEADLINE_S, **variables)
    assert ended.returncode == 0, ended.stderr
    return read_results(ended.stdout)


@pytest.mark.tensorflow
def test_multiworker(slurm: SlurmCluster, two_hosts: list[str], alone: dict[str, Any], tmp_path: Path) -> None:
    results = train(slurm, two_hosts, tmp_path, "multiworker")
    check_equal(results, alone, ["n1", "n2"], "MultiWorkerStrategy")


@pytest.mark.thorough  # mpirun started by `tfdistkit run --backend mpi` runs the same each time
@pytest.mark.tensorflow
@pytest.mark.horovod
def test_horovod(
    slurm: SlurmCluster, two_hosts: list[str], alone: dict[str, Any], horovod_with_mpi: Path, tmp_path: Path
) -> None:
    path = os.pathsep.join([str(horovod_with_mpi), str(ROOT)])
    results = train(slurm, two_hosts, tmp_path, "auto", PYTHONPATH=path)
    check_equal(results, alone, ["n1", "n2"], "HorovodStrategy")
