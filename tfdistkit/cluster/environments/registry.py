"""Environments by name: readers of what a launcher or a scheduler tells a process about its cluster.

A package adds one by an entry point, `tfdistkit.environments = <name> = <module>:<Environment>`; see docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tfdistkit.cluster.environments import horovod, launcher, mpi, sge, slurm
from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.entry_points import entry_points, load
from tfdistkit.errors import ClusterConfigError

ENTRY_POINT_GROUP = "tfdistkit.environments"


@dataclass(frozen=True)
class Environment:
    """Reads the cluster from the variables of one launcher or scheduler.

    Args:
        name: The value of `TFDISTKIT_CLUSTER` that selects it.
        variables: The variables that it reads.
        read: Returns the cluster, or None if the variables are not set; raises ClusterConfigError if they are invalid.
            None for a scheduler that tells hosts only.
        explains: Names of later environments to ignore, because this one's launcher sets their variables.
        hosts: Returns the hosts of an allocation in which nothing has been started yet, or None outside of one; for a
            scheduler that starts one process and leaves the rest to it.
    """

    name: str
    variables: tuple[str, ...]
    read: Callable[[], ClusterSpec | None] | None = None
    explains: tuple[str, ...] = ()
    hosts: Callable[[], tuple[HostSlots, ...] | None] | None = None


# In order of priority: the first one that finds a cluster wins.
_BUILT_IN = (
    Environment("tf_config", launcher.VARIABLES, launcher.read_tf_config),
    Environment("horovod", horovod.VARIABLES, horovod.read_horovod),
    # On remote hosts of an allocation, mpirun starts its daemons with srun: the variables of that step are ignored.
    Environment("mpi", mpi.VARIABLES, mpi.read_mpi, explains=("slurm",)),
    Environment("slurm", slurm.VARIABLES, slurm.read_slurm),
    Environment("sge", (sge.VARIABLE,), hosts=sge.read_pe_hostfile),
)


def environments() -> tuple[Environment, ...]:
    """Returns all environments in order of priority; those of other packages come last.

    Raises:
        ClusterConfigError: if the entry point of a package cannot be loaded, or is no Environment.
    """
    added = (load(entry, Environment, ClusterConfigError) for entry in entry_points(ENTRY_POINT_GROUP))
    return (*_BUILT_IN, *added)


def allocated_hosts() -> tuple[HostSlots, ...] | None:
    """Returns the hosts that a scheduler allocated to this job and that wait for processes; None without any.

    Raises:
        ClusterConfigError: if a host list is invalid.
    """
    lists = (one.hosts() for one in environments() if one.hosts is not None)
    return next((hosts for hosts in lists if hosts is not None), None)
