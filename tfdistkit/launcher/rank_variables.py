"""The environment variables that describe the cluster to a process: one function per backend.

They also select the description that counts: the shell may hold another job's (a SLURM step, mpirun, `HOROVOD_*`,
`TFDISTKIT_CLUSTER`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfdistkit import env
from tfdistkit.cluster.environments import horovod
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.cluster.tf_config import to_tf_config
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.placement import LOOPBACK

# The network interface of NCCL.
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def rank_variables(backend: str, cluster: ClusterSpec) -> dict[str, str]:
    """Returns the variables that describe the cluster to one process; some backends add more when they start it.

    Args:
        backend: One of `launcher.backend.BACKENDS`.
        cluster: The cluster from the view of this process.
    """
    return _OF_BACKEND[backend](cluster)


def default_variables(backend: str, interface: str | None) -> dict[str, str]:
    """Returns the default variables of a backend, which the user may override.

    Args:
        backend: One of `launcher.backend.BACKENDS`.
        interface: The network interface of the process; None if unknown.
    """
    if interface is None:
        return {}
    # NCCL bootstraps over this interface, whatever transport carries the data; on one machine its default is better.
    nccl = {} if interface == LOOPBACK else {NCCL_INTERFACE: interface}
    return {**nccl, horovod.GLOO_INTERFACE: interface} if backend == "horovod" else nccl


def check_variables(backend: str, wanted: Mapping[str, str], cluster: ClusterSpec) -> None:
    """Checks that the user sets no variable that the launcher sets for each worker.

    Args:
        backend: One of `launcher.backend.BACKENDS`.
        wanted: The variables that the user sets for the workers.
        cluster: All processes.

    Raises:
        OptionError: if the launcher sets one of them.
    """
    own = rank_variables(backend, cluster)
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


def _tf_config(cluster: ClusterSpec) -> dict[str, str]:
    return {env.TF_CONFIG: to_tf_config(cluster), env.CLUSTER: "tf_config"}


def _gloo(cluster: ClusterSpec) -> dict[str, str]:
    return {**horovod.gloo_variables(cluster), env.CLUSTER: "horovod"}


def _mpi(cluster: ClusterSpec) -> dict[str, str]:
    """MPI provides rank and size, but no roles."""
    if "ps" in cluster.addresses:
        return _tf_config(cluster)
    return {horovod.CONTROLLER: "mpi", horovod.CPU_OPERATIONS: "mpi", env.CLUSTER: "mpi"}


_OF_BACKEND: dict[str, Callable[[ClusterSpec], dict[str, str]]] = {
    "local": _tf_config,
    "horovod": _gloo,
    "mpi": _mpi,
}
