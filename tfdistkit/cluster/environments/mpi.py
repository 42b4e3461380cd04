"""MPI's variables: what `mpirun` and `mpiexec` tell each process.

No variable of this kind is standardized: each launcher has its own. `srun --mpi=...` tells the rank in SLURM's own
variables, see `slurm`.
"""

from __future__ import annotations

from tfdistkit import env
from tfdistkit.cluster.environments import slurm
from tfdistkit.cluster.environments.rank_size import CountVariables, read_counts
from tfdistkit.cluster.spec import ClusterSpec

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
# What is looked at.
VARIABLES = tuple(
    name for names in (OPEN_MPI, _HYDRA) for name in (names.rank, names.size, names.local_rank, names.local_size)
)


def read_mpi() -> ClusterSpec | None:
    """Returns the cluster that the variables of `mpirun` or `mpiexec` describe, or None when they are not set.

    Raises:
        ClusterConfigError: if they contradict each other.
    """
    found = read_counts(OPEN_MPI)
    # srun's PMI-2 sets rank and size under the names of Hydra, but not the local rank; there, SLURM knows more.
    under_srun = slurm.is_step() and env.text(_HYDRA.local_rank) is None
    return found or (None if under_srun else read_counts(_HYDRA))
