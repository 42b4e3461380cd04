"""Computes the node of each task of a SLURM step.

No variable lists the nodes. All tasks know the number of tasks on each node and the distribution
(srun(1), `--distribution`), which determine the nodes unless these are overcommitted unevenly.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def block(counts: Sequence[int]) -> tuple[int, ...]:
    """Places tasks by filling one node after the other, SLURM's default.

    Args:
        counts: The number of tasks on each node.

    Returns:
        The node (an index into `counts`) of each task, in rank order.
    """
    return tuple(node for node, count in enumerate(counts) for _ in range(count))


def plane(counts: Sequence[int], size: int) -> tuple[int, ...]:
    """Places tasks round-robin in blocks of `size` per node; size 1 is `cyclic`.

    Args:
        counts: The number of tasks on each node.
        size: The number of tasks per block, >= 1.

    Returns:
        The node of each task, in rank order.
    """
    left = list(counts)
    nodes: list[int] = []
    for node in itertools.cycle(range(len(counts))):
        if not any(left):
            return tuple(nodes)
        placed = min(size, left[node])
        left[node] -= placed
        nodes += [node] * placed
    return ()


def local_places(hosts: Sequence[str]) -> tuple[int, ...]:
    """Numbers the tasks of each host from 0.

    Args:
        hosts: The host of each task, in rank order.

    Returns:
        The local rank of each task on its host.
    """
    counts: dict[str, int] = {}
    places = []
    for host in hosts:
        places.append(counts.get(host, 0))
        counts[host] = places[-1] + 1
    return tuple(places)
