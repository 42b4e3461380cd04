"""Lets the ranks of a strategy compare their data before they shard it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.collectives import registry


def agreed(dataset: tf.data.Dataset | None, parts: int, call: str, **facts: Any) -> Any:
    """Compares the whole data of all ranks; does nothing before a strategy exists.

    Args:
        dataset: The data before sharding; None to compare only `facts`.
        parts: The number of shards.
        call: The function that the user called, for the error.
        **facts: Further values that must be equal on all ranks, as JSON can hold them.

    Returns:
        The dataset, with the seeds of rank 0.

    Raises:
        UnsupportedError: on all ranks, if their data or `facts` differ.
    """
    last = registry.last_made()
    agree: Any = getattr(last.strategy, "agreed_data", None) if last is not None else None
    if agree is None or last is None or registry.process_count(last.strategy) != parts:
        return dataset
    return agree(dataset, call, facts)
