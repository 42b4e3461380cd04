"""Reads clusters from rank, size, local rank and local size, without addresses."""

from __future__ import annotations

from dataclasses import dataclass

from tfdistkit import env
from tfdistkit.cluster.spec import ClusterSpec, TaskSpec
from tfdistkit.errors import ClusterConfigError, explain


@dataclass(frozen=True)
class RankVariables:
    """Names the variables for rank and size of one launcher.

    Args:
        source: The source of the cluster, for messages.
        rank: The rank among all processes.
        size: The number of processes.
        local_rank: The rank among the processes of this host.
        local_size: The number of processes on this host.
    """

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str


def read_rank_size(names: RankVariables) -> ClusterSpec | None:
    """Reads a cluster from four variables.

    Args:
        names: The names of the variables.

    Returns:
        The cluster; None if rank and size are both unset: this launcher did not start the process.

    Raises:
        ClusterConfigError: if a number is out of range, or one of rank and size is missing.
    """
    rank, size = env.integer(names.rank), env.integer(names.size)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        what = f"`{names.rank}` and `{names.size}` must be set together."
        received = f"{names.rank}={rank}, {names.size}={size}"
        raise ClusterConfigError(explain(what, received=received, expected="both of them, or neither"))
    local_rank, local_size = env.integer(names.local_rank), env.integer(names.local_size)
    return make_cluster(
        names,
        rank=rank,
        size=size,
        # Without a local rank, the only safe assumption is one process on this host.
        local_rank=0 if local_rank is None else local_rank,
        local_size=1 if local_rank is None or local_size is None else local_size,
    )


def make_cluster(names: RankVariables, *, rank: int, size: int, local_rank: int, local_size: int) -> ClusterSpec:
    """Makes a cluster from rank and size, after checking their ranges.

    Args:
        names: The names of the variables, for messages.
        rank: The rank among all processes.
        size: The number of processes.
        local_rank: The rank among the processes of this host.
        local_size: The number of processes on this host.

    Returns:
        The cluster: workers without addresses.

    Raises:
        ClusterConfigError: if a number is out of range.
    """
    for name, is_valid, bounds in (
        (names.size, size >= 1, ">= 1"),
        (names.rank, 0 <= rank < size, f">= 0 and below `{names.size}`"),
        (names.local_size, 1 <= local_size <= size, f"from 1 to `{names.size}`"),
        (names.local_rank, 0 <= local_rank < local_size, f">= 0 and below `{names.local_size}`"),
    ):
        if not is_valid:
            received = f"{names.rank}={rank}, {names.size}={size}"
            received += f", {names.local_rank}={local_rank}, {names.local_size}={local_size}"
            raise ClusterConfigError(explain(f"`{name}` must be {bounds}.", received=received))
    return ClusterSpec(
        task=TaskSpec("worker", rank),
        local_rank=local_rank,
        local_world_size=local_size,
        source=names.source,
        size=size,
    )
