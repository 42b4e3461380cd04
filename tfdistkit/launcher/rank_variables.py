"""How each backend tells a worker its place in the job: the variables of the cluster, one function per backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tfdistkit import env
from tfdistkit.cluster import horovod
from tfdistkit.cluster.spec import ClusterSpec, TaskSpec
from tfdistkit.cluster.tf_config import to_tf_config
from tfdistkit.errors import OptionError, explain

# All workers are on this machine. Not `localhost`: it may stand for ::1 first, where TensorFlow does not listen.
HOST = "127.0.0.1"

# Which library carries Horovod's decisions, and which one its data.
_CONTROLLER = "HOROVOD_CONTROLLER"
_CPU_OPERATIONS = "HOROVOD_CPU_OPERATIONS"
# The network interface of Gloo.
_GLOO_INTERFACE = "HOROVOD_GLOO_IFACE"


def rank_variables(backend: str, rank: int, ports: Sequence[int]) -> dict[str, str]:
    """Returns what a backend tells one worker about the cluster; some backends add what is known at the start only.

    Args:
        backend: One of `launcher.backend.BACKENDS`.
        rank: The worker.
        ports: A free port for each worker.
    """
    return _OF_BACKEND[backend](rank, ports)


def default_variables(backend: str) -> dict[str, str]:
    """Returns what is best for a backend on one machine, unless the user says otherwise."""
    return {_GLOO_INTERFACE: "lo"} if backend == "horovod" else {}


def check_variables(backend: str, wanted: Mapping[str, str]) -> None:
    """Lets nobody set what the launcher itself tells each worker.

    Args:
        backend: One of `launcher.backend.BACKENDS`.
        wanted: The variables that the user sets for the workers.

    Raises:
        OptionError: if one of them is the launcher's.
    """
    own = rank_variables(backend, 0, (1,))
    for name in wanted:
        if name in own:
            raise OptionError(
                explain(
                    f"`env` sets a variable that the backend {backend!r} itself gives to each worker.",
                    received=f"{name}={wanted[name]}",
                    expected=f"any variable but {', '.join(own)}",
                )
            )


def _tf_config(rank: int, ports: Sequence[int]) -> dict[str, str]:
    addresses = {"worker": tuple(f"{HOST}:{port}" for port in ports)}
    return {env.TF_CONFIG: to_tf_config(ClusterSpec(addresses, TaskSpec("worker", rank)))}


def _gloo(rank: int, ports: Sequence[int]) -> dict[str, str]:
    names, size = horovod.NAMES, str(len(ports))
    return {
        names.rank: str(rank),
        names.size: size,
        names.local_rank: str(rank),
        names.local_size: size,
        # Which of the hosts this is: there is one.
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "HOROVOD_HOSTNAME": HOST,
        _CONTROLLER: "gloo",
        _CPU_OPERATIONS: "gloo",
    }


def _mpi(rank: int, ports: Sequence[int]) -> dict[str, str]:
    """Rank and size are MPI's own to tell."""
    return {_CONTROLLER: "mpi", _CPU_OPERATIONS: "mpi"}


_OF_BACKEND: dict[str, Callable[[int, Sequence[int]], dict[str, str]]] = {
    "local": _tf_config,
    "horovod": _gloo,
    "mpi": _mpi,
}
