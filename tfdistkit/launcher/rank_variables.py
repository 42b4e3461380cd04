"""The environment variables that describe the cluster to a process: one function for each row of `registry`.

They also select the description that counts: the shell may hold another job's (a SLURM step, mpirun, `HOROVOD_*`,
`TFDISTKIT_CLUSTER`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdistkit import env
from tfdistkit.cluster.environments import horovod
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.cluster.tf_config import to_tf_config
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.placement import LOOPBACK

# The network interface of NCCL.
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
# Horovod's own value, and how many of its stall checks fit into a hang timeout.
_STALL_CHECK_S, _STALL_CHECKS = 60, 5


def nccl_interface(interface: str) -> dict[str, str]:
    """Returns the variable by which NCCL connects over a network interface.

    NCCL makes its first connections over it, whatever carries the data then; on one machine it knows better ways.

    Args:
        interface: The network interface of a process.
    """
    return {} if interface == LOOPBACK else {NCCL_INTERFACE: interface}


def gloo_interface(interface: str) -> dict[str, str]:
    """Returns the variables by which Horovod's Gloo and NCCL connect over a network interface.

    Args:
        interface: The network interface of a process.
    """
    return {**nccl_interface(interface), horovod.GLOO_INTERFACE: interface}


def tf_config(cluster: ClusterSpec) -> dict[str, str]:
    """Returns the variables of a process that learns its cluster from TF_CONFIG.

    Args:
        cluster: All processes, and which one this is.
    """
    return {env.TF_CONFIG: to_tf_config(cluster), env.CLUSTER: "tf_config"}


def gloo(cluster: ClusterSpec) -> dict[str, str]:
    """Returns the variables of one of Horovod's Gloo ranks.

    Args:
        cluster: All processes, and which one this is.
    """
    return {**horovod.gloo_variables(cluster), env.CLUSTER: "horovod"}


def mpi(cluster: ClusterSpec) -> dict[str, str]:
    """Returns the variables of an MPI rank. Rank and size are MPI's own to tell; roles are not.

    Args:
        cluster: All processes, and which one this is.
    """
    if "ps" in cluster.addresses:
        return tf_config(cluster)
    return {horovod.CONTROLLER: "mpi", horovod.CPU_OPERATIONS: "mpi", env.CLUSTER: "mpi"}


def stall_check(hang_timeout_s: float | None) -> dict[str, str]:
    """Returns the variable by which Horovod tells in time which rank has not called a collective of the others.

    Horovod waits as long three times at most before it tells: until it forgets that it knew the tensor, until it counts
    as late, and until the next check.

    Args:
        hang_timeout_s: The hang timeout of the job, in seconds; None without one.
    """
    longest_s = None if hang_timeout_s is None else max(1, int(hang_timeout_s / _STALL_CHECKS))
    is_sooner = longest_s is not None and longest_s < _STALL_CHECK_S
    return {horovod.STALL_CHECK: str(longest_s)} if is_sooner else {}


def check_variables(backend: str, wanted: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Refuses variables of the user that the launcher itself sets for each worker.

    Args:
        backend: The name of the backend.
        wanted: The variables that the user sets for the workers.
        own: Those that the backend sets.

    Raises:
        OptionError: if the launcher sets one of them.
    """
    for name in wanted:
        if name in own:
            raise OptionError(
                explain(
                    f"`env` must not set the variables that the backend {backend!r} sets for each worker: "
                    f"{', '.join(own)}.",
                    received=f"{name}={wanted[name]}",
                    do="Leave it out.",
                )
            )
