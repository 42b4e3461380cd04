"""Detects the cluster of this process from the environment variables that its launcher set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfdistkit import env
from tfdistkit.cluster import requested
from tfdistkit.cluster.conflicts import require_agreement
from tfdistkit.cluster.environments.registry import Environment, environments
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import ClusterConfigError, explain, nearest

# Value of `TFDISTKIT_CLUSTER` for a single process, whatever the other variables are.
_SINGLE = "single"


@dataclass(frozen=True)
class Finding:
    """Holds the result of one reader.

    Args:
        reader: The reader's name.
        variables: Its variables that are set.
        cluster: The cluster; None without one, or if the variables are invalid.
        error: The error in the variables, or None.
    """

    reader: str
    variables: Mapping[str, str]
    cluster: ClusterSpec | None = None
    error: ClusterConfigError | None = None


def _readers() -> tuple[Environment, ...]:
    return tuple(one for one in environments() if one.read is not None)


def detect_cluster() -> ClusterSpec:
    """Detects the cluster and the rank of this process from environment variables.

    Reads TF_CONFIG if it is set; `TFDISTKIT_LOCAL_RANK` and `TFDISTKIT_LOCAL_WORLD_SIZE` override the local rank that
    its address list implies. Otherwise reads the variables of Horovod (`horovodrun`) or MPI (`mpirun`), which give the
    rank but no addresses, or of a SLURM step (`srun`), which give both. Without any of these, it is a single process.
    If several are set, they must agree on rank and size, unless the later ones describe a single process.
    `TFDISTKIT_CLUSTER` selects one. Caches nothing, and uses neither the network nor TensorFlow.

    Returns:
        The cluster, with the task of this process.

    Raises:
        ClusterConfigError: if the variables are invalid.
    """
    only = env.text(env.CLUSTER)
    if only is not None:
        return _read_only(only)
    readers = _readers()
    for position, reader in enumerate(readers):
        cluster = _read(reader)
        if cluster is not None:
            _check_others(reader, cluster, readers[position + 1 :])
            return cluster
    return ClusterSpec()


def run_all_readers() -> tuple[Finding, ...]:
    """Runs every reader, to explain how the cluster is detected.

    Returns:
        One finding for each reader, in order of priority.
    """
    return tuple(_finding(reader) for reader in _readers())


def _read(reader: Environment) -> ClusterSpec | None:
    return None if reader.read is None else reader.read()


def _finding(reader: Environment) -> Finding:
    values = {name: value for name in reader.variables if (value := env.text(name)) is not None}
    try:
        return Finding(reader.name, values, _read(reader))
    except ClusterConfigError as error:
        return Finding(reader.name, values, error=error)


def _read_only(name: str) -> ClusterSpec:
    if name == _SINGLE:
        return ClusterSpec()
    readers = {reader.name: reader for reader in _readers()}
    names = list(readers)
    if name not in names:
        raise ClusterConfigError(
            explain(
                f"`{env.CLUSTER}` must be one of: {', '.join(names)}, {_SINGLE}.{nearest(name, names)}",
                received=f"{env.CLUSTER}={name}",
            )
        )
    reader = readers[name]
    cluster = _read(reader)
    if cluster is None:
        raise ClusterConfigError(
            explain(
                f"`{env.CLUSTER}` must name a launcher whose variables are set.",
                received=f"{env.CLUSTER}={name}",
                expected=f"some of the variables {', '.join(reader.variables)}",
                do=f"Unset {env.CLUSTER}, or start the script with the launcher that sets them.",
            )
        )
    return cluster


def _check_others(reader: Environment, cluster: ClusterSpec, others: tuple[Environment, ...]) -> None:
    """Checks that later readers find the same job. Their own errors are ignored: they are not used."""
    own, explained = _finding(reader), set(reader.explains)
    for other in others:
        found = _finding(other)
        if found.cluster is None:
            continue
        if other.name not in explained:
            require_agreement(cluster, own.variables, found.cluster, found.variables, names=(reader.name, other.name))
        explained |= set(other.explains)


def rank() -> int:
    """Returns the rank of this process among the training processes; 0 for a single process.

    With parameter servers it is the index of the worker; the coordinator, which has no replica, is 0 too.

    Returns:
        The rank. The chief is 0.

    Raises:
        ClusterConfigError: if the variables are invalid, or this process is a parameter server or an evaluator.
    """
    requested.note("rank")
    return detect_cluster().rank


def world_size() -> int:
    """Returns the number of training processes of the job; 1 for a single process.

    Returns:
        The number of processes with a replica: chief and workers; with parameter servers, the workers.

    Raises:
        ClusterConfigError: if the variables are invalid.
    """
    requested.note("rank")
    return detect_cluster().world_size


def local_rank() -> int:
    """Returns the rank of this process among the training processes of this host.

    Returns:
        The local rank, from 0. It selects the GPU.

    Raises:
        ClusterConfigError: if the variables are invalid.
    """
    requested.note("rank")
    return detect_cluster().local_rank


def is_chief() -> bool:
    """Returns whether this process writes checkpoints and logs; True for a single process.

    Returns:
        True for one process of the job: rank 0, or with parameter servers the coordinator.

    Raises:
        ClusterConfigError: if the variables are invalid.
    """
    requested.note("rank")
    return detect_cluster().is_chief
