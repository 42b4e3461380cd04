"""Which part of the data is this process's, and which rows of a global batch."""

from __future__ import annotations

import operator
from typing import Any

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import registry
from tfdistkit.errors import OptionError, explain, nearest

EVEN_STEPS = ("drop", "pad", "error")


def find_place(num_shards: Any, index: Any) -> tuple[int, int]:
    """Returns how many parts there are, and which of them is this process's.

    Args:
        num_shards: What the user said; None for the world size.
        index: What the user said; None for the rank.

    Raises:
        OptionError: if the numbers are wrong, or one is missing.
    """
    if (num_shards is None) != (index is None):
        received = f"num_shards={num_shards!r}, index={index!r}"
        raise OptionError(explain("One of `num_shards` and `index` is missing.", received=received, expected="both"))
    if num_shards is None:
        cluster = detect_cluster()
        # The coordinator of workers with parameter servers hands all of the data out to them.
        return (1, 0) if cluster.is_coordinator else (cluster.world_size, cluster.rank)
    num_shards, index = whole_number("num_shards", num_shards), whole_number("index", index)
    if num_shards < 1:
        raise OptionError(
            explain("`num_shards` is no number of parts.", received=str(num_shards), expected="1 or more")
        )
    if not 0 <= index < num_shards:
        raise OptionError(
            explain("`index` names no part.", received=f"index={index}", expected=f"0 to {num_shards - 1}")
        )
    return num_shards, index


def per_replica_batch_size(global_batch_size: int, *, num_shards: int | None = None, index: int | None = None) -> int:
    """Tells how many rows of a global batch this process's replica gets.

    For loops of one's own: `shard(dataset).batch(per_replica_batch_size(64))`. `fit` and
    `strategy.distribute_batches` cut global batches themselves, and want the global batch size. If the replicas do
    not divide the batch evenly, the first ones get a row more: the sum over all replicas is the global batch size.

    Args:
        global_batch_size: Rows of a global batch.
        num_shards: The number of replicas. Default: that of the strategy that was made last, else the world size.
        index: The replica, from 0. Default: the first one of this process.

    Returns:
        The rows; 0 for the last replicas if there are more replicas than rows.

    Raises:
        OptionError: (a ValueError) if the numbers are wrong.
    """
    size = whole_number("global_batch_size", global_batch_size)
    if size < 1:
        raise OptionError(explain("`global_batch_size` is too small.", received=str(size), expected="1 or more"))
    if num_shards is None and index is None:
        num_shards, index = _replicas()
    parts, own = find_place(num_shards, index)
    return size // parts + (own < size % parts)


def _replicas() -> tuple[int, int]:
    """Returns how many replicas there are, and the first one of this process."""
    last = registry.last_made()
    processes, rank = find_place(None, None)
    if last is None or registry.process_count(last.strategy) != processes:
        return processes, rank
    replicas = int(last.strategy.num_replicas_in_sync)
    return replicas, rank * (replicas // processes)


def whole_number(name: str, value: Any) -> int:
    """Returns an argument as an int.

    Args:
        name: What the argument is called.
        value: What the user gave.

    Raises:
        OptionError: if it is no whole number.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise OptionError(explain(f"`{name}` is no whole number.", received=f"{name}={value!r}", expected="such as 2"))


def require_choice(name: str, value: Any, known: tuple[str, ...], do: str | None = None) -> None:
    """Checks a word that the user gave.

    Args:
        name: What the argument is called.
        value: What the user gave.
        known: What it may be.
        do: The next step, if it is something else.

    Raises:
        OptionError: if it is something else.
    """
    if value not in known:
        raise OptionError(
            explain(
                f"`{name}` is unknown.{nearest(str(value), list(known))}",
                received=f"{name}={value!r}",
                expected=f"one of: {', '.join(known)}",
                do=do,
            )
        )


def require_even_steps(even_steps: Any) -> None:
    """Checks the argument `even_steps`.

    Args:
        even_steps: What the user gave.

    Raises:
        OptionError: if it is unknown.
    """
    if even_steps is not None:
        require_choice("even_steps", even_steps, EVEN_STEPS)


def uneven(count: int, parts: int, what: str) -> OptionError:
    """Returns the error for `even_steps="error"`.

    Args:
        count: How many there are.
        parts: Among how many they are to be divided.
        what: What they are.
    """
    return OptionError(
        explain(
            f"{count} {what} cannot be divided evenly among {parts} workers.",
            received='even_steps="error"',
            expected=f"a multiple of {parts}",
            do='Take even_steps="drop" or "pad", or leave it out: `fit` needs no even parts.',
        )
    )
