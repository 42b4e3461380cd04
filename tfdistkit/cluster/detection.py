"""Finds the cluster that this process belongs to: whoever started it left a description in the environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tfdistkit import env
from tfdistkit.cluster.horovod import read_horovod
from tfdistkit.cluster.mpi import read_mpi, read_slurm_mpi
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.cluster.tf_config import from_tf_config
from tfdistkit.errors import ClusterConfigError, explain


def _read_tf_config() -> ClusterSpec | None:
    text = env.text(env.TF_CONFIG)
    return None if text is None else _with_local_rank(from_tf_config(text))


def _read_single_process() -> ClusterSpec:
    return ClusterSpec()


# In this order; the first that finds something wins. A new scheduler is one reader and one row.
_READERS: tuple[Callable[[], ClusterSpec | None], ...] = (
    _read_tf_config,
    read_horovod,
    read_mpi,
    read_slurm_mpi,
    _read_single_process,
)


def detect_cluster() -> ClusterSpec:
    """Reads from the environment which process of which cluster this is.

    TF_CONFIG is read if it is set; the launcher's `TFDISTKIT_LOCAL_RANK` and `TFDISTKIT_LOCAL_WORLD_SIZE` win
    over what its address list suggests. Without it, the variables of Horovod (`horovodrun`) and of MPI
    (`mpirun`, `srun --mpi=pmix`) tell the rank, though no addresses; without these it is a single process.
    Nothing is cached, and neither the network nor TensorFlow is touched.

    Returns:
        The cluster and this process's place in it.

    Raises:
        ClusterConfigError: if the description is wrong; the message names the mistake.
    """
    return next(spec for reader in _READERS if (spec := reader()) is not None)


def rank() -> int:
    """This process's number among the training processes, from 0; 0 for a single process.

    With parameter servers it is the number of the worker; the coordinator, which has no replica, is 0 too.

    Returns:
        The rank. The chief is 0.

    Raises:
        ClusterConfigError: if the cluster's description is wrong, or this process is a parameter server or
            an evaluator.
    """
    return detect_cluster().rank


def world_size() -> int:
    """How many training processes the job has; 1 for a single process.

    Returns:
        The number of processes with a replica: chief and workers; with parameter servers, the workers.

    Raises:
        ClusterConfigError: if the cluster's description is wrong.
    """
    return detect_cluster().world_size


def local_rank() -> int:
    """This process's number among the training processes of this host, from 0.

    Returns:
        The local rank: what a process picks its GPU by.

    Raises:
        ClusterConfigError: if the cluster's description is wrong.
    """
    return detect_cluster().local_rank


def is_chief() -> bool:
    """Whether this process writes checkpoints and logs; True for a single process.

    Returns:
        True for one process of the job: rank 0, or with parameter servers the coordinator.

    Raises:
        ClusterConfigError: if the cluster's description is wrong.
    """
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
