"""The ranks of a strategy compare what they are about to divide."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.collectives import registry


def agreed(dataset: tf.data.Dataset | None, parts: int, call: str, **facts: Any) -> Any:
    """Lets the ranks compare the whole of their data; without a strategy there is no way to the others.

    Args:
        dataset: The data, before it is divided; None where only `facts` are compared.
        parts: Into how many parts it is divided.
        call: What the user called, for the error.
        **facts: What else has to be equal on all ranks: anything that JSON can hold.

    Returns:
        The dataset, with the seeds of rank 0.

    Raises:
        UnsupportedError: on all ranks, if something differs.
    """
    last = registry.last_made()
    agree: Any = getattr(last.strategy, "agreed_data", None) if last is not None else None
    if agree is None or last is None or registry.process_count(last.strategy) != parts:
        return dataset
    return agree(dataset, call, facts)
