"""How each backend tells a process its place in the job: the variables of the cluster, one function per backend.

They say which description of a cluster counts, too: the shell may hold that of another job (a step of SLURM, mpirun,
`HOROVOD_*`, `TFDISTKIT_CLUSTER`).
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
    """Returns what a backend tells one process about the cluster; some backends add what is known at the start only.

    Args:
        backend: One of `launcher.backend.BACKENDS`.
        cluster: All processes, and which one this is.
    """
    return _OF_BACKEND[backend](cluster)


def default_variables(backend: str, interface: str | None) -> dict[str, str]:
    """Returns what is best for a backend, unless the user says otherwise.

    Args:
        backend: One of `launcher.backend.BACKENDS`.
        interface: The network interface of the process; None where it is not known.
    """
    if interface is None:
        return {}
    # NCCL makes its first connections over it, whatever carries the data then; on one machine it knows better ways.
    nccl = {} if interface == LOOPBACK else {NCCL_INTERFACE: interface}
    return {**nccl, horovod.GLOO_INTERFACE: interface} if backend == "horovod" else nccl


def check_variables(backend: str, wanted: Mapping[str, str], cluster: ClusterSpec) -> None:
    """Lets nobody set what the launcher itself tells each worker.

    Args:
        backend: One of `launcher.backend.BACKENDS`.
        wanted: The variables that the user sets for the workers.
        cluster: All processes.

    Raises:
        OptionError: if one of them is the launcher's.
    """
    own = rank_variables(backend, cluster)
    for name in wanted:
        if name in own:
            raise OptionError(
                explain(
                    f"`env` sets a variable that the backend {backend!r} itself gives to each worker.",
                    received=f"{name}={wanted[name]}",
                    expected=f"any variable but {', '.join(own)}",
                )
            )


def _tf_config(cluster: ClusterSpec) -> dict[str, str]:
    return {env.TF_CONFIG: to_tf_config(cluster), env.CLUSTER: "tf_config"}


def _gloo(cluster: ClusterSpec) -> dict[str, str]:
    return {**horovod.gloo_variables(cluster), env.CLUSTER: "horovod"}


def _mpi(cluster: ClusterSpec) -> dict[str, str]:
    """Rank and size are MPI's own to tell; roles are not."""
    if "ps" in cluster.addresses:
        return _tf_config(cluster)
    return {horovod.CONTROLLER: "mpi", horovod.CPU_OPERATIONS: "mpi", env.CLUSTER: "mpi"}


_OF_BACKEND: dict[str, Callable[[ClusterSpec], dict[str, str]]] = {
    "local": _tf_config,
    "horovod": _gloo,
    "mpi": _mpi,
}
