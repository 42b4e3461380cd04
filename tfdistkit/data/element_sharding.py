"""Elements dealt to the workers one by one, like cards; and what is done about a remainder."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data.padding import require_weights_fit, weighted
from tfdistkit.data.shard_spec import uneven


def deal(dataset: tf.data.Dataset, num_shards: int, index: int, even_steps: str | None) -> tf.data.Dataset:
    """Takes every `num_shards`-th element, beginning with number `index`.

    Args:
        dataset: The same elements in the same order on every worker.
        num_shards: The number of parts.
        index: The part to take.
        even_steps: What to do about a remainder: `"drop"`, `"pad"`, `"error"`; None lets the parts differ by one.

    Returns:
        The part.

    Raises:
        OptionError: if there is a remainder and shall be none.
    """
    if even_steps == "pad":
        dataset = with_weights(dataset)
    if num_shards == 1:
        return dataset
    if even_steps is None:
        return dataset.shard(num_shards, index)
    size = _size(dataset)
    if size == tf.data.INFINITE_CARDINALITY:
        return dataset.shard(num_shards, index)
    if size == tf.data.UNKNOWN_CARDINALITY:
        return _deal_by_rounds(dataset, num_shards, index, even_steps)
    if even_steps == "error" and size % num_shards:
        raise uneven(size, num_shards, "elements")
    if even_steps == "pad":
        dataset = padded(dataset, -size % num_shards)
    part = dataset.shard(num_shards, index)
    return part.take(size // num_shards) if even_steps == "drop" else part


def with_weights(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Gives every element a sample weight, so that padding can follow.

    Args:
        dataset: A dataset of (x, y) or (x, y, sample_weight).

    Raises:
        OptionError: if its elements are something else.
    """
    require_weights_fit(dataset.element_spec)
    return dataset.map(lambda *element: weighted(element, tf.constant(False)))


def padded(dataset: tf.data.Dataset, missing: int) -> tf.data.Dataset:
    """Appends padding: copies of the first element that weigh nothing.

    Args:
        dataset: A dataset of (x, y, sample_weight).
        missing: How many.
    """
    if missing == 0:
        return dataset
    # Cached, for the first element may lie behind a buffer that has to be filled.
    return dataset.concatenate(dataset.take(1).cache().repeat(missing).map(_as_padding))


def _size(dataset: tf.data.Dataset) -> int:
    """The number of elements; unknown in a graph that makes a dataset."""
    size = tf.get_static_value(dataset.cardinality())
    return tf.data.UNKNOWN_CARDINALITY if size is None else int(size)


def _as_padding(*element: Any) -> tuple:
    return weighted(element, tf.constant(True))


def _deal_by_rounds(dataset: tf.data.Dataset, num_shards: int, index: int, even_steps: str) -> tf.data.Dataset:
    """Deals a dataset of unknown length: a round is dealt when all of its elements are there."""

    in_tuple = isinstance(dataset.element_spec, tuple)

    def own(*windows: Any) -> tf.data.Dataset:
        in_round = tf.data.Dataset.zip(windows if in_tuple else windows[0])
        if even_steps == "pad":
            mine = in_round.skip(index).take(1)
            return mine.concatenate(in_round.take(1).map(_as_padding)).take(1)
        if even_steps == "error":
            in_round = in_round.apply(tf.data.experimental.assert_cardinality(num_shards))
        return in_round.shard(num_shards, index)

    return dataset.window(num_shards, drop_remainder=even_steps == "drop").flat_map(own)
