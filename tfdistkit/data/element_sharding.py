"""Shards single elements among the workers in turn, and handles the remainder."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data.padding import require_weights_fit, with_weight
from tfdistkit.data.shard_spec import uneven


def shard_elements(dataset: tf.data.Dataset, num_shards: int, index: int, even_steps: str | None) -> tf.data.Dataset:
    """Takes every `num_shards`-th element, beginning with number `index`.

    Args:
        dataset: The same elements in the same order on every worker.
        num_shards: The number of shards.
        index: The shard to take.
        even_steps: How to handle a remainder: `"drop"`, `"pad"`, `"error"`; None lets the shards differ by one.

    Returns:
        The shard.

    Raises:
        OptionError: if there is a remainder with `"error"`.
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
        return _shard_by_rounds(dataset, num_shards, index, even_steps)
    if even_steps == "error" and size % num_shards:
        raise uneven(size, num_shards, "elements")
    if even_steps == "pad":
        dataset = padded(dataset, -size % num_shards)
    part = dataset.shard(num_shards, index)
    return part.take(size // num_shards) if even_steps == "drop" else part


def with_weights(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Gives every element a sample weight, so that padding can be appended.

    Args:
        dataset: A dataset of (x, y) or (x, y, sample_weight).

    Raises:
        OptionError: if its elements have another structure.
    """
    require_weights_fit(dataset.element_spec)
    return dataset.map(lambda *element: with_weight(element, tf.constant(False)))


def padded(dataset: tf.data.Dataset, missing: int) -> tf.data.Dataset:
    """Appends padding: copies of the first element with weight 0.

    Args:
        dataset: A dataset of (x, y, sample_weight).
        missing: The number of copies.
    """
    if missing == 0:
        return dataset
    # Cached, because the first element may come from a shuffle buffer that must be filled first.
    return dataset.concatenate(dataset.take(1).cache().repeat(missing).map(_as_padding))


def _size(dataset: tf.data.Dataset) -> int:
    """Returns the number of elements; unknown when the dataset is built in a graph."""
    size = tf.get_static_value(dataset.cardinality())
    return tf.data.UNKNOWN_CARDINALITY if size is None else int(size)


def _as_padding(*element: Any) -> tuple:
    return with_weight(element, tf.constant(True))


def _shard_by_rounds(dataset: tf.data.Dataset, num_shards: int, index: int, even_steps: str) -> tf.data.Dataset:
    """Shards a dataset of unknown length in windows of `num_shards` elements, one for each worker."""

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
