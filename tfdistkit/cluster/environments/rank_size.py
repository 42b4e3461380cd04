"""Clusters that are told in numbers: rank, size, local rank and local size, but no addresses."""

from __future__ import annotations

from dataclasses import dataclass

from tfdistkit import env
from tfdistkit.cluster.spec import ClusterSpec, TaskSpec
from tfdistkit.errors import ClusterConfigError, explain


@dataclass(frozen=True)
class CountVariables:
    """The names of the variables in which a launcher tells a process its place.

    Args:
        source: What the cluster was read from, for messages.
        rank: The number among all processes.
        size: How many processes there are.
        local_rank: The number among those of this host.
        local_size: How many there are on this host.
    """

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str


def read_counts(names: CountVariables) -> ClusterSpec | None:
    """Reads a cluster from four variables.

    Args:
        names: Their names.

    Returns:
        The cluster; None when rank and size are both unset: somebody else, or nobody, started this process.

    Raises:
        ClusterConfigError: if the numbers contradict each other, or one of rank and size is missing.
    """
    rank, size = env.integer(names.rank), env.integer(names.size)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        what = f"Only one of `{names.rank}` and `{names.size}` is set."
        received = f"{names.rank}={rank}, {names.size}={size}"
        raise ClusterConfigError(explain(what, received=received, expected="both of them, or neither"))
    local_rank, local_size = env.integer(names.local_rank), env.integer(names.local_size)
    return cluster_of_counts(
        names,
        rank=rank,
        size=size,
        # A launcher that speaks of no hosts: the only safe guess is that this process has its host to itself.
        local_rank=0 if local_rank is None else local_rank,
        local_size=1 if local_rank is None or local_size is None else local_size,
    )


def cluster_of_counts(names: CountVariables, *, rank: int, size: int, local_rank: int, local_size: int) -> ClusterSpec:
    """Checks four numbers and makes a cluster of them.

    Args:
        names: Where they come from, for messages.
        rank: The number among all processes.
        size: How many processes there are.
        local_rank: The number among those of this host.
        local_size: How many there are on this host.

    Returns:
        The cluster: workers without addresses.

    Raises:
        ClusterConfigError: if the numbers contradict each other.
    """
    for name, number, lowest, highest in (
        (names.size, size, 1, None),
        (names.rank, rank, 0, size - 1),
        (names.local_size, local_size, 1, size),
        (names.local_rank, local_rank, 0, local_size - 1),
    ):
        if number < lowest or (highest is not None and number > highest):
            raise ClusterConfigError(
                explain(
                    f"`{name}` does not fit the other variables of {names.source}.",
                    received=f"{names.rank}={rank}, {names.size}={size}, "
                    f"{names.local_rank}={local_rank}, {names.local_size}={local_size}",
                    expected=f"`{name}` to be {lowest} or more" if highest is None else f"{lowest} to {highest}",
                )
            )
    return ClusterSpec(
        task=TaskSpec("worker", rank),
        local_rank=local_rank,
        local_world_size=local_size,
        source=names.source,
        size=size,
    )
