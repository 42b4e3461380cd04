"""Finds the cluster that this process belongs to: whoever started it left a description in the environment."""

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

# What `TFDISTKIT_CLUSTER` calls a process that belongs to no cluster, whatever its variables say.
_SINGLE = "single"


@dataclass(frozen=True)
class Reader:
    """One way to tell a process of its cluster.

    Args:
        name: What `TFDISTKIT_CLUSTER` calls it.
        variables: What it looks at.
        read: Returns the cluster, or None when the variables are not set.
        explains: Names of later readers whose finding comes from this one's launcher, and says nothing.
    """

    name: str
    variables: tuple[str, ...]
    read: Callable[[], ClusterSpec | None]
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """What one reader found.

    Args:
        reader: The reader's name.
        variables: Those of its variables that are set.
        cluster: The cluster; None when there is none, or the variables are wrong.
        error: What is wrong with the variables, if anything is.
    """

    reader: str
    variables: Mapping[str, str]
    cluster: ClusterSpec | None = None
    error: ClusterConfigError | None = None


def _read_tf_config() -> ClusterSpec | None:
    text = env.text(env.TF_CONFIG)
    return None if text is None else _with_local_rank(from_tf_config(text))


# In this order; the first that finds something wins. A new scheduler is one reader and one row.
_READERS = (
    Reader("tf_config", (env.TF_CONFIG, env.LOCAL_RANK, env.LOCAL_WORLD_SIZE), _read_tf_config),
    Reader("horovod", horovod.VARIABLES, horovod.read_horovod),
    # On the other hosts of an allocation, mpirun starts its own daemons with srun: their step is not the job's.
    Reader("mpi", mpi.VARIABLES, mpi.read_mpi, explains=("slurm",)),
    Reader("slurm", slurm.VARIABLES, slurm.read_slurm),
)


def detect_cluster() -> ClusterSpec:
    """Reads from the environment which process of which cluster this is.

    TF_CONFIG is read if it is set; the launcher's `TFDISTKIT_LOCAL_RANK` and `TFDISTKIT_LOCAL_WORLD_SIZE` win
    over what its address list suggests. Without it, the variables of Horovod (`horovodrun`) and of MPI
    (`mpirun`) tell the rank, though no addresses, and those of a SLURM step (`srun`) tell both; without these it is a
    single process. Where several of them are there, they must agree on rank and size, unless all but the first are
    about one process. `TFDISTKIT_CLUSTER` names the one that counts. Nothing is cached, and neither the network nor
    TensorFlow is touched.

    Returns:
        The cluster and this process's place in it.

    Raises:
        ClusterConfigError: if the description is wrong; the message names the mistake.
    """
    only = env.text(env.CLUSTER)
    if only is not None:
        return _read_only(only)
    for place, reader in enumerate(_READERS):
        cluster = reader.read()
        if cluster is not None:
            _check_others(reader, cluster, _READERS[place + 1 :])
            return cluster
    return ClusterSpec()


def look_around() -> tuple[Finding, ...]:
    """Asks every reader, for those who want to know why the cluster is what it is.

    Returns:
        One finding for each reader, in the order in which they are asked; none of them is preferred here.
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
                f"`{env.CLUSTER}` names nothing that a cluster can be read from.{nearest(name, names)}",
                received=f"{env.CLUSTER}={name}",
                expected=f"one of: {', '.join(names)}, {_SINGLE}",
            )
        )
    reader = _READERS[names.index(name)]
    cluster = reader.read()
    if cluster is None:
        raise ClusterConfigError(
            explain(
                f"`{env.CLUSTER}` says where the cluster is to be read from, but nothing is there.",
                received=f"{env.CLUSTER}={name}",
                expected=f"some of the variables {', '.join(reader.variables)}",
                do=f"Unset {env.CLUSTER}, or start the script with what sets them.",
            )
        )
    return cluster


def _check_others(reader: Reader, cluster: ClusterSpec, others: tuple[Reader, ...]) -> None:
    """What else is described must be the same job. Mistakes in it are nobody's business: it is not used."""
    own, explained = _finding(reader), set(reader.explains)
    for other in others:
        found = _finding(other)
        if found.cluster is None:
            continue
        if other.name not in explained:
            require_agreement(cluster, own.variables, found.cluster, found.variables, names=(reader.name, other.name))
        explained |= set(other.explains)


def rank() -> int:
    """This process's number among the training processes, from 0; 0 for a single process.

    With parameter servers it is the number of the worker; the coordinator, which has no replica, is 0 too.

    Returns:
        The rank. The chief is 0.

    Raises:
        ClusterConfigError: if the cluster's description is wrong, or this process is a parameter server or
            an evaluator.
    """
    requested.note("rank")
    return detect_cluster().rank


def world_size() -> int:
    """How many training processes the job has; 1 for a single process.

    Returns:
        The number of processes with a replica: chief and workers; with parameter servers, the workers.

    Raises:
        ClusterConfigError: if the cluster's description is wrong.
    """
    requested.note("rank")
    return detect_cluster().world_size


def local_rank() -> int:
    """This process's number among the training processes of this host, from 0.

    Returns:
        The local rank: what a process picks its GPU by.

    Raises:
        ClusterConfigError: if the cluster's description is wrong.
    """
    requested.note("rank")
    return detect_cluster().local_rank


def is_chief() -> bool:
    """Whether this process writes checkpoints and logs; True for a single process.

    Returns:
        True for one process of the job: rank 0, or with parameter servers the coordinator.

    Raises:
        ClusterConfigError: if the cluster's description is wrong.
    """
    requested.note("rank")
    return detect_cluster().is_chief


def _with_local_rank(spec: ClusterSpec) -> ClusterSpec:
    """Lets the launcher's variables win over the local rank that the address list suggests."""
    local_rank = env.integer(env.LOCAL_RANK)
    size = env.integer(env.LOCAL_WORLD_SIZE)
    if local_rank is None and size is None or spec.is_coordinator or not spec.is_training:
        return spec
    received = f"{env.LOCAL_RANK}={local_rank}, {env.LOCAL_WORLD_SIZE}={size}, world size {spec.world_size}"
    if local_rank is None or size is None:
        what = f"Only one of `{env.LOCAL_RANK}` and `{env.LOCAL_WORLD_SIZE}` is set."
        raise ClusterConfigError(explain(what, received=received, expected="both of them, or neither"))
    if not 1 <= size <= spec.world_size:
        what = f"`{env.LOCAL_WORLD_SIZE}` does not fit the cluster in {spec.source}."
        raise ClusterConfigError(explain(what, received=received, expected=f"1 to {spec.world_size}"))
    if not 0 <= local_rank < size:
        what = f"`{env.LOCAL_RANK}` does not fit `{env.LOCAL_WORLD_SIZE}`."
        raise ClusterConfigError(explain(what, received=received, expected=f"0 to {size - 1}"))
    return replace(spec, local_rank=local_rank, local_world_size=size)
