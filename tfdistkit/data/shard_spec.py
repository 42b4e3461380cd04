"""The shard of this process: the number of shards, its index, and its rows of a global batch."""

from __future__ import annotations

from typing import Any

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import registry
from tfdistkit.data.rows import rows_of
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_choice, require_integer

EVEN_STEPS = ("drop", "pad", "error")


def find_shard(num_shards: Any, index: Any) -> tuple[int, int]:
    """Returns the number of shards and the index of this process's shard.

    Args:
        num_shards: The user's argument; None for the world size.
        index: The user's argument; None for the rank.

    Raises:
        OptionError: if a number is out of range, or only one of them is given.
    """
    if (num_shards is None) != (index is None):
        raise OptionError(
            explain(
                "`num_shards` and `index` must be given together.",
                received=f"num_shards={num_shards!r}, index={index!r}",
                do="Pass both, or neither: the defaults are the world size and the rank.",
            )
        )
    if num_shards is None:
        cluster = detect_cluster()
        # A parameter-server coordinator reads all of the data for its workers.
        return (1, 0) if cluster.is_coordinator else (cluster.world_size, cluster.rank)
    num_shards = require_integer("num_shards", num_shards)
    return num_shards, require_integer("index", index, at_least=0, at_most=num_shards - 1)


def per_replica_batch_size(global_batch_size: int, *, num_shards: int | None = None, index: int | None = None) -> int:
    """Returns the rows of a global batch that this process's replica gets.

    For custom training loops: `shard(dataset).batch(per_replica_batch_size(64))`. `fit` and
    `strategy.distribute_batches` split global batches themselves, so give them the global batch size. If the batch
    does not divide evenly, the first replicas get one row more: the sum over all replicas is the global batch size.

    Args:
        global_batch_size: Rows of a global batch.
        num_shards: The number of replicas. Default: the newest strategy's, else the world size.
        index: The replica, from 0. Default: the first one of this process.

    Returns:
        The rows; 0 for the last replicas if there are more replicas than rows.

    Raises:
        OptionError: (a ValueError) if an argument is not an integer, or out of range.
    """
    size = require_integer("global_batch_size", global_batch_size)
    if num_shards is None and index is None:
        num_shards, index = _replicas()
    parts, own = find_shard(num_shards, index)
    return int(rows_of(size, parts, own)[1])


def _replicas() -> tuple[int, int]:
    """Returns the number of replicas and the first one of this process."""
    last = registry.last_made()
    processes, rank = find_shard(None, None)
    if last is None or registry.process_count(last.strategy) != processes:
        return processes, rank
    replicas = int(last.strategy.num_replicas_in_sync)
    return replicas, rank * (replicas // processes)


def require_even_steps(even_steps: Any) -> None:
    """Raises an error if the argument `even_steps` is not one of its values.

    Args:
        even_steps: The user's argument.

    Raises:
        OptionError: if it is something else.
    """
    if even_steps is not None:
        require_choice("even_steps", even_steps, EVEN_STEPS)


def uneven(count: int, parts: int, what: str) -> OptionError:
    """Returns the error for data that `even_steps="error"` does not allow.

    Args:
        count: The number of elements, rows or files.
        parts: The number of workers.
        what: The noun that `count` counts.
    """
    return OptionError(
        explain(
            f'The number of {what} must be a multiple of the number of workers with even_steps="error".',
            received=f"{count} {what}, {parts} workers",
            do='Pass even_steps="drop" or "pad", or leave it out: `fit` accepts uneven shards.',
        )
    )
