"""The variables of every task of a SLURM step, as slurmstepd 22.05 sets them."""

from __future__ import annotations

import pytest

JOB, STEP = 4711, 2
# sbatch --ntasks=3: the script itself has a rank and a size, but no step.
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASK_PID": "2711",
    "SLURMD_NODENAME": "n1",
    "SLURM_CPUS_ON_NODE": "8",
}
# salloc: a shell on the machine where it was typed.
SALLOC = {name: BATCH[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE")}


def step(
    hosts: list[str], nodelist: str, counts: str, nodes: list[str] | None = None, **more: str
) -> list[dict[str, str]]:
    """Returns the variables of each task.

    Args:
        hosts: The node of each task, in rank order.
        nodelist: The step's nodes, as SLURM writes them.
        counts: The number of tasks on each, as SLURM writes it.
        nodes: The same nodes one by one, in SLURM's order; default: in the order in which tasks use them.
        **more: More variables, the same for all tasks.
    """
    nodes = nodes or list(dict.fromkeys(hosts))
    ranks = {node: [rank for rank, host in enumerate(hosts) if host == node] for node in nodes}
    return [
        {
            **BATCH,
            "SLURM_STEP_ID": str(STEP),
            "SLURM_STEPID": str(STEP),
            "SLURM_STEP_NUM_NODES": str(len(nodes)),
            "SLURM_STEP_NUM_TASKS": str(len(hosts)),
            "SLURM_NTASKS": str(len(hosts)),
            "SLURM_STEP_NODELIST": nodelist,
            "SLURM_STEP_TASKS_PER_NODE": counts,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(ranks[host].index(rank)),
            "SLURM_NODEID": str(nodes.index(host)),
            "SLURM_GTIDS": ",".join(map(str, ranks[host])),
            "SLURMD_NODENAME": host,
            "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.254",
            "SLURM_SRUN_COMM_HOST": "10.77.0.254",
            **more,
        }
        for rank, host in enumerate(hosts)
    ]


def put(monkeypatch: pytest.MonkeyPatch, *groups: dict[str, str | None]) -> None:
    """Makes these the variables of this process; None removes one."""
    for group in groups:
        for name, value in group.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
