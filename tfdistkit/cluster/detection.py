"""Detects the cluster of this process from the environment variables that its launcher set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tfdistkit import env
from tfdistkit.cluster import requested
from tfdistkit.cluster.conflicts import require_agreement
from tfdistkit.cluster.environments import horovod, mpi, slurm
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.cluster.tf_config import from_tf_config
from tfdistkit.errors import ClusterConfigError, explain, nearest

# Value of `TFDISTKIT_CLUSTER` for a single process, whatever the other variables are.
_SINGLE = "single"


@dataclass(frozen=True)
class Reader:
    """Reads the cluster from the variables of one launcher.

    Args:
        name: The value of `TFDISTKIT_CLUSTER` that selects it.
        variables: The variables that it reads.
        read: Returns the cluster, or None if the variables are not set.
        explains: Names of later readers to ignore, because this reader's launcher sets their variables.
    """

    name: str
    variables: tuple[str, ...]
    read: Callable[[], ClusterSpec | None]
    explains: tuple[str, ...] = ()


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


def _read_tf_config() -> ClusterSpec | None:
    text = env.text(env.TF_CONFIG)
    return None if text is None else _with_local_rank(from_tf_config(text))


# In order of priority: the first reader that finds a cluster wins. A new scheduler is one reader and one row.
_READERS = (
    Reader("tf_config", (env.TF_CONFIG, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE), _read_tf_config),
    Reader("horovod", horovod.VARIABLES, horovod.read_horovod),
    # On remote hosts of an allocation, mpirun starts its daemons with srun: the variables of that step are ignored.
    Reader("mpi", mpi.VARIABLES, mpi.read_mpi, explains=("slurm",)),
    Reader("slurm", slurm.VARIABLES, slurm.read_slurm),
)


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
    for position, reader in enumerate(_READERS):
        cluster = reader.read()
        if cluster is not None:
            _check_others(reader, cluster, _READERS[position + 1 :])
            return cluster
    return ClusterSpec()


def run_all_readers() -> tuple[Finding, ...]:
    """Runs every reader, to explain how the cluster is detected.

    Returns:
        One finding for each reader, in order of priority.
    """
    return tuple(_finding(reader) for reader in _READERS)


def _finding(reader: Reader) -> Finding:
    values = {name: value for name in reader.variables if (value := env.text(name)) is not None}
    try:
        return Finding(reader.name, values, reader.read())
    except ClusterConfigError as error:
        return Finding(reader.name, values, error=error)


def _read_only(name: str) -> ClusterSpec:
    if name == _SINGLE:
        return ClusterSpec()
    names = [reader.name for reader in _READERS]
    if name not in names:
        raise ClusterConfigError(
            explain(
                f"`{env.CLUSTER}` must be one of: {', '.join(names)}, {_SINGLE}.{nearest(name, names)}",
                received=f"{env.CLUSTER}={name}",
            )
        )
    reader = _READERS[names.index(name)]
    cluster = reader.read()
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


def _check_others(reader: Reader, cluster: ClusterSpec, others: tuple[Reader, ...]) -> None:
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


def _with_local_rank(spec: ClusterSpec) -> ClusterSpec:
    """Overrides the local rank that the address list implies with the launcher's variables."""
    local_rank = env.integer(env.LOCAL_RANK)
    size = env.integer(env.LOCAL_WORLD_SIZE)
    if local_rank is None and size is None or spec.is_coordinator or not spec.is_training:
        return spec
    received = f"{env.LOCAL_RANK}={local_rank}, {env.LOCAL_WORLD_SIZE}={size}, world size {spec.world_size}"
    if local_rank is None or size is None:
        what = f"`{env.LOCAL_RANK}` and `{env.LOCAL_WORLD_SIZE}` must be set together."
        raise ClusterConfigError(explain(what, received=received, expected="both of them, or neither"))
    if not 1 <= size <= spec.world_size:
        what = f"`{env.LOCAL_WORLD_SIZE}` must be from 1 to the world size in {spec.source}."
        raise ClusterConfigError(explain(what, received=received, expected=f"1 to {spec.world_size}"))
    if not 0 <= local_rank < size:
        what = f"`{env.LOCAL_RANK}` must be at least 0 and below `{env.LOCAL_WORLD_SIZE}`."
        raise ClusterConfigError(explain(what, received=received, expected=f"0 to {size - 1}"))
    return replace(spec, local_rank=local_rank, local_world_size=size)
