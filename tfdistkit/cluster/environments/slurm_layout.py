"""Which task of a SLURM step runs on which node.

No variable lists it. What is known to all tasks is the number of tasks on each node and the distribution
(srun(1), `--distribution`); together they tell it, unless nodes are overcommitted unevenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def block(counts: Sequence[int]) -> tuple[int, ...]:
    """Fills one node after the other, which is SLURM's default.

    Args:
        counts: The number of tasks on each node.

    Returns:
        The node (its place in `counts`) of each task, in rank order.
    """
    return tuple(node for node, count in enumerate(counts) for _ in range(count))


def plane(counts: Sequence[int], size: int) -> tuple[int, ...]:
    """Gives each node `size` tasks in turn, and again, until all are given; size 1 is `cyclic`.

    Args:
        counts: The number of tasks on each node.
        size: How many tasks a node gets before it is the next one's turn, 1 or more.

    Returns:
        The node of each task, in rank order.
    """
    left = list(counts)
    nodes: list[int] = []
    for node in itertools.cycle(range(len(counts))):
        if not any(left):
            return tuple(nodes)
        given = min(size, left[node])
        left[node] -= given
        nodes += [node] * given
    return ()


def local_places(hosts: Sequence[str]) -> tuple[int, ...]:
    """Numbers the tasks of each host from 0.

    Args:
        hosts: The host of each task, in rank order.

    Returns:
        For each task, how many of those before it are on its host.
    """
    seen: dict[str, int] = {}
    places = []
    for host in hosts:
        places.append(seen.get(host, 0))
        seen[host] = places[-1] + 1
    return tuple(places)
