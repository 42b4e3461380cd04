"""Splits the rows of a table into shards, and looks up rows in them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api, table_rows

# A smaller table stays in one shard: a lookup costs one request per shard.
_WORTH_SPLITTING_BYTES = 64 * 2**20


def number_of_servers() -> int:
    """Returns the number of parameter servers of the strategy in scope; 0 for other strategies."""
    return private_api.number_of_servers(tf.distribute.get_strategy())


def count_shards(rows: int, row_bytes: int, servers: int, shard_bytes: int) -> int:
    """Returns the default number of shards of a table.

    Args:
        rows: Rows of the table.
        row_bytes: Bytes of a row.
        servers: The number of parameter servers.
        shard_bytes: The largest shard, in bytes.

    Returns:
        1 for a small table and without several servers; else a multiple of the number of servers, so that all servers
        hold equal parts.
    """
    table_bytes = rows * row_bytes
    if servers < 2 or table_bytes <= _WORTH_SPLITTING_BYTES:
        return 1
    return min(rows, servers * max(1, -(-table_bytes // (servers * shard_bytes))))


def first_rows(rows: int, shards: int) -> list[int]:
    """Divides rows evenly: the first shards get one more if the division is uneven (TensorFlow's "div").

    Args:
        rows: Rows of the table.
        shards: The number of shards.

    Returns:
        The first row of each shard, and at the end the number of rows.
    """
    least, more = divmod(rows, shards)
    return [0, *itertools.accumulate(least + (i < more) for i in range(shards))]


def look_up(shards: Sequence[Any], ids: tf.Tensor, dtype: Any) -> tf.Tensor:
    """Reads rows of a sharded table, from each shard only those that it holds.

    Args:
        shards: The Keras variables, in the order of their rows.
        ids: Row numbers, an integer tensor of any shape. Negative ones count from the end, as in one table.
        dtype: The dtype of the result. Rows are cast where they are read.

    Returns:
        A tensor of the shape `[*ids.shape, *shards[0].shape[1:]]`.
    """
    rows = sum(v.shape[0] for v in shards)
    count = len(shards)
    flat = tf.reshape(ids, [-1])
    flat = tf.where(flat < 0, flat + rows, flat)
    least, more = divmod(rows, count)
    # An id out of range goes to the last shard, which raises the error of an unsharded table.
    part = tf.minimum(tf.maximum(flat // (least + 1), (flat - more) // least), count - 1)
    own = flat - tf.gather(tf.constant(first_rows(rows, count)[:-1], flat.dtype), part)
    part = tf.cast(part, tf.int32)
    places = tf.dynamic_partition(tf.range(tf.size(flat)), part, count)
    wanted = tf.dynamic_partition(own, part, count)
    found = [tf.cast(table_rows.read_rows(shard, own_ids), dtype) for shard, own_ids in zip(shards, wanted)]
    width = shards[0].shape[1:]
    result = tf.reshape(tf.dynamic_stitch(places, found), tf.concat([tf.shape(ids), width], 0))
    result.set_shape([*ids.shape, *width])
    return result
