"""Reads the variables that MPI's `mpirun` and `mpiexec` set for each process.

None of them is standardized: each launcher has its own. `srun --mpi=...` gives the rank in SLURM's variables, see
`slurm`.
"""

from __future__ import annotations

from tfdistkit import env
from tfdistkit.cluster.environments import slurm
from tfdistkit.cluster.environments.rank_size import RankVariables, read_rank_size
from tfdistkit.cluster.spec import ClusterSpec

# https://docs.open-mpi.org, "Environment variables": set by Open MPI's mpirun.
OPEN_MPI = RankVariables(
    source="Open MPI's variables",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
# The mpiexec of MPICH, Intel MPI and MVAPICH (Hydra).
_HYDRA = RankVariables(
    source="the variables of MPI's mpiexec",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
)
# The variables that are read.
VARIABLES = tuple(
    name for names in (OPEN_MPI, _HYDRA) for name in (names.rank, names.size, names.local_rank, names.local_size)
)


def read_mpi() -> ClusterSpec | None:
    """Returns the cluster of the variables of `mpirun` or `mpiexec`, or None if they are not set.

    Raises:
        ClusterConfigError: if they contradict each other.
    """
    found = read_rank_size(OPEN_MPI)
    # srun's PMI-2 sets rank and size under Hydra's names, but no local rank: SLURM's variables have more.
    under_srun = slurm.is_step() and env.text(_HYDRA.local_rank) is None
    return found or (None if under_srun else read_rank_size(_HYDRA))
