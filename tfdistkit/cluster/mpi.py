"""MPI's variables: what `mpirun`, `mpiexec` and `srun --mpi=...` tell each process.

No variable of this kind is standardized: each launcher has its own. `srun` tells the rank in SLURM's variables, and
these alone say nothing about MPI: a step without MPI has them too, so one that MPI's runtime sets must be there.
"""

from __future__ import annotations

import re

from tfdistkit import env
from tfdistkit.cluster.counts import CountVariables, cluster_of_counts, read_counts
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, explain

# https://docs.open-mpi.org, "Environment variables": set by Open MPI's mpirun.
OPEN_MPI = CountVariables(
    source="Open MPI's variables",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
# The mpiexec of MPICH, Intel MPI and MVAPICH (Hydra).
_HYDRA = CountVariables(
    source="the variables of MPI's mpiexec",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
)
# srun(1), "Output environment variables".
_SLURM = CountVariables(
    source="SLURM's variables",
    rank="SLURM_PROCID",
    size="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_size="SLURM_STEP_TASKS_PER_NODE",
)
# What the runtime of MPI itself finds its rank by, under `srun --mpi=pmix` and `--mpi=pmi2`.
_MPI_UNDER_SLURM = ("PMIX_RANK", "PMI_RANK")
_NODE = "SLURM_NODEID"
_TASKS_PER_NODE = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def read_mpi() -> ClusterSpec | None:
    """Returns the cluster that the variables of `mpirun` or `mpiexec` describe, or None when they are not set.

    Raises:
        ClusterConfigError: if they contradict each other.
    """
    found = read_counts(OPEN_MPI)
    # srun's PMI-2 sets the same names as Hydra; there, SLURM knows the local rank.
    return found or (None if env.text(_SLURM.rank) else read_counts(_HYDRA))


def read_slurm_mpi() -> ClusterSpec | None:
    """Returns the cluster of an `srun --mpi=...` step, or None when this is none.

    Raises:
        ClusterConfigError: if SLURM's variables contradict each other.
    """
    if not any(env.text(name) for name in _MPI_UNDER_SLURM) or env.text(_SLURM.rank) is None:
        return None
    numbers = {name: env.integer(name) for name in (_SLURM.rank, _SLURM.size, _SLURM.local_rank, _NODE)}
    per_node = env.text(_SLURM.local_size)
    missing = [name for name, number in {**numbers, _SLURM.local_size: per_node}.items() if number is None]
    if missing:
        raise ClusterConfigError(
            explain(
                "SLURM's variables are not complete.",
                received=f"{_SLURM.rank}={numbers[_SLURM.rank]}, but no {' and no '.join(missing)}",
                expected="all variables that srun sets for a task",
                do="Start the script with srun itself, and let nothing in between clean the environment.",
            )
        )
    rank, size, local_rank, node = (int(number or 0) for number in numbers.values())
    local_size = _tasks_on(node, per_node or "")
    return cluster_of_counts(_SLURM, rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def _tasks_on(node: int, tasks_per_node: str) -> int:
    """The tasks on one node out of SLURM's short form: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _TASKS_PER_NODE.fullmatch(part.strip())
        if match is None:
            counts = []
            break
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ClusterConfigError(
            explain(
                f"`{_SLURM.local_size}` does not tell the number of tasks on this node.",
                received=f"{_SLURM.local_size}={tasks_per_node!r}, {_NODE}={node}",
                expected="one number for each node of the step, such as '2(x3),1'",
            )
        )
    return counts[node]
