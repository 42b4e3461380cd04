"""What the reader of SLURM's variables says is what each task of a real step is."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

# What the task is, as the machine tells it, and what the reader says; then all meet at the addresses that it says.
TELL = """
    import json, os, socket, sys
    from tfdistkit.cluster import detect_cluster, exchange_facts, split_address
    spec = detect_cluster()
    told = {
        "host": os.uname().nodename,
        "rank": spec.rank if spec.is_training else None,
        "role": [spec.task.role, spec.task.index],
        "size": spec.world_size,
        "local": [spec.local_rank, spec.local_world_size],
        "addresses": {role: [list(split_address(a)) for a in listed] for role, listed in spec.addresses.items()},
        "is_chief": spec.is_chief,
    }
    if spec.address:
        with socket.create_server(("", split_address(spec.address)[1])):
            pass  # its own port is free
    if spec.world_size > 1 and not spec.has_servers:
        told["met"] = [one["pid"] for one in exchange_facts(spec, {"pid": os.getpid()}, 60).facts]
    told["pid"] = os.getpid()
    os.write(1, (json.dumps(told) + chr(10)).encode())
"""


@pytest.fixture
def script(slurm: SlurmCluster, tmp_path: Path) -> str:
    path = tmp_path / "tell.py"
    path.write_text(textwrap.dedent(TELL))
    return str(path)


def srun(slurm: SlurmCluster, script: str, *options: str, **variables: str) -> list[dict[str, Any]]:
    """Returns what each task told, in the order of SLURM's own labels."""
    ended = slurm.run("srun", "--label", *options, sys.executable, script, **variables)
    assert ended.returncode == 0, ended.stderr
    lines = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    return [json.loads(lines[str(task)]) for task in range(len(lines))]


def check(tasks: list[dict[str, Any]], hosts: list[str]) -> None:
    """All tasks have one picture, and it is where they really are."""
    assert [task["host"] for task in tasks] == hosts
    addresses = tasks[0]["addresses"]
    listed = [address for role in addresses.values() for address in role]
    assert [host for host, _ in listed] == hosts
    assert len({tuple(address) for address in listed}) == len(hosts)
    assert all(task["addresses"] == addresses for task in tasks)


def check_workers(tasks: list[dict[str, Any]], hosts: list[str]) -> None:
    """The same for equal workers, who have met too."""
    check(tasks, hosts)
    assert [task["rank"] for task in tasks] == list(range(len(hosts)))
    assert {task["size"] for task in tasks} == {len(hosts)}
    assert [task["is_chief"] for task in tasks] == [True] + [False] * (len(hosts) - 1)
    count = Counter(hosts)
    assert [task["local"] for task in tasks] == [[hosts[:i].count(host), count[host]] for i, host in enumerate(hosts)]
    pids = [task["pid"] for task in tasks]
    assert all(task.get("met", pids) == pids for task in tasks)
    assert len(hosts) == 1 or all("met" in task for task in tasks)


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ("-n1", "n1"),
        ("-w n1,n2 -n2", "n1 n2"),
        ("-w n1,n2 --ntasks-per-node=2", "n1 n1 n2 n2"),
        ("-w n2,n10 -n2", "n2 n10"),
        ("-w n2,n10 --ntasks-per-node=2 -m cyclic", "n2 n10 n2 n10"),
        ("-w n1,n2 -n2 --mpi=pmix", "n1 n2"),
        ("-w n1,n2 -n2 --mpi=pmi2", "n1 n2"),
        ("-w n1 -n1 SCRIPT : -w n3 -n2", "n1 n3 n3"),
    ],
)
def test_tasks_are_where_the_reader_says(slurm: SlurmCluster, script: str, options: str, hosts: str) -> None:
    words = options.replace("SCRIPT", f"{sys.executable} {script}").split()
    check_workers(srun(slurm, script, *words), hosts.split())


@pytest.mark.parametrize("options", ["-N3 -n5", "-w n2,n10 -n4 -m cyclic", "-N2 -n6 -m plane=2"])
def test_nodes_with_different_numbers_of_tasks(slurm: SlurmCluster, script: str, options: str) -> None:
    tasks = srun(slurm, script, *options.split())
    hosts = [task["host"] for task in tasks]
    assert len(set(Counter(hosts).values())) == 2, "SLURM gives one of the nodes more"
    check_workers(tasks, hosts)


def test_an_order_of_the_users_own(slurm: SlurmCluster, script: str, tmp_path: Path) -> None:
    hosts = ["n10", "n1", "n10", "n2"]
    (tmp_path / "hosts").write_text("\n".join(hosts) + "\n")
    variables = {"SLURM_HOSTFILE": str(tmp_path / "hosts"), "SLURM_ARBITRARY_NODELIST": ",".join(hosts)}
    check_workers(srun(slurm, script, "-n4", "-m", "arbitrary", **variables), hosts)


def test_roles(slurm: SlurmCluster, script: str) -> None:
    tasks = srun(slurm, script, "-w", "n1,n2", "--ntasks-per-node=2", TFDISTKIT_PS="1")
    check(tasks, ["n1", "n1", "n2", "n2"])
    assert [task["role"] for task in tasks] == [["chief", 0], ["worker", 0], ["worker", 1], ["ps", 0]]
    assert {task["size"] for task in tasks} == {2}


def test_a_batch_script_is_one_process_and_its_steps_are_clusters(
    slurm: SlurmCluster, script: str, tmp_path: Path
) -> None:
    python = f"{sys.executable} {script}"
    batch = tmp_path / "batch.sh"
    # Two steps at the same time, which share n2; the reader gives them different ports.
    batch.write_text(
        f"#!/bin/sh\n{python} > alone\n"
        f"srun --overlap -w n1,n2 -n2 -l {python} > first & srun --overlap -w n2,n3 -n2 -l {python} > second & wait\n"
    )
    ended = slurm.run("sbatch", "--wait", "-w", "n[1-3]", "-n6", str(batch), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    alone = json.loads((tmp_path / "alone").read_text())
    assert (alone["host"], alone["size"], alone["addresses"]) == ("n1", 1, {})
    steps = []
    for name in ("first", "second"):
        lines = dict(line.split(": ", 1) for line in (tmp_path / name).read_text().splitlines())
        steps.append([json.loads(lines[str(task)]) for task in (0, 1)])
    check_workers(steps[0], ["n1", "n2"])
    check_workers(steps[1], ["n2", "n3"])
    ports = [{port for _, port in step[0]["addresses"]["worker"]} for step in steps]
    assert not ports[0] & ports[1]


def test_env_command_in_a_step(slurm: SlurmCluster) -> None:
    ended = slurm.run("srun", "-w", "n2,n10", "-n2", "-l", sys.executable, "-m", "tfdistkit", "env")
    assert ended.returncode == 0, ended.stderr
    lines = {line.replace(" ", "") for line in ended.stdout.splitlines()}
    expected = {"1:slurmrank1of2", "1:SLURM_STEP_NODELIST=n[2,10]", "1:clusterfromSLURM'svariables"}
    assert expected <= lines, ended.stdout


@pytest.mark.parametrize(
    ("options", "seen", "of_step"),
    [
        ("--gpus-per-task=2", ["0,1", "2,3"], 4),
        ("--gpus-per-task=1", ["0", "1"], 2),
        ("--gres=gpu:2", ["0,1", "0,1"], 2),
        ("", ["", ""], None),
    ],
)
def test_own_gpus_are_distinguished_from_shared_ones(
    slurm: SlurmCluster, options: str, seen: list[str], of_step: int | None
) -> None:
    """A task that sees fewer than its step has here was given them for itself: see `strategies.devices`."""
    code = "import os; from tfdistkit.cluster.environments import slurm; "
    code += "seen = os.environ.get('CUDA_VISIBLE_DEVICES', ''); print(repr((seen, slurm.gpus_of_step_here())))"
    ended = slurm.run("srun", "-N1", "-n2", "-l", *options.split(), sys.executable, "-c", code)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{task}: {(one, of_step)!r}" for task, one in enumerate(seen)]
