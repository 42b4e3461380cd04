"""Initializers for the shards of a table: together they give the values of the unsharded table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

# Up to this size the whole table is made in memory and sliced into shards.
_LARGEST_WHOLE_BYTES = 2**30


def initializers_of_parts(initializer: Any, first_rows: Sequence[int], width: int, row_bytes: int) -> list[Any]:
    """Returns the initializers of the shards of a table.

    Args:
        initializer: The initializer of the table.
        first_rows: The first row of each shard, and at the end the number of rows.
        width: Columns of the table.
        row_bytes: Bytes of a row.

    Returns:
        One initializer for each shard. Up to 1 GiB, together they give the values of `initializer` for the unsharded
        table. Beyond it, each shard has its own random numbers, of the same distribution.
    """
    rows = first_rows[-1]
    if len(first_rows) == 2:
        return [initializer]
    if rows * row_bytes <= _LARGEST_WHOLE_BYTES:
        table = _Table(initializer, (rows, width), first_rows[:-1])
        return [table.part(first) for first in first_rows[:-1]]
    sizes = [end - first for first, end in zip(first_rows, first_rows[1:])]
    return [_of_its_own(initializer, first, size, rows, width) for first, size in zip(first_rows, sizes)]


class _Table:
    """Makes a whole table for the first of its shards, and frees it after the last one."""

    def __init__(self, initializer: Any, shape: tuple[int, int], first_rows: Sequence[int]):
        self._initializer = initializer
        self._shape = shape
        self._first_rows = first_rows
        self._waiting: set[int] = set()
        self._table: Any = None

    def part(self, first: int) -> Callable[..., Any]:
        """Returns the initializer of the shard that begins at row `first`."""

        def rows(shape: Any, dtype: Any = None) -> Any:
            # Not on a parameter server: each server receives its shard only.
            with tf.device(None):
                return self._whole(first, dtype)[first : first + shape[0]]

        return rows

    def _whole(self, first: int, dtype: Any) -> Any:
        if not tf.executing_eagerly():
            return self._initializer(self._shape, dtype=dtype)
        if self._table is None:
            self._table = self._initializer(self._shape, dtype=dtype)
            self._waiting = set(self._first_rows)
        self._waiting.discard(first)
        table = self._table
        if not self._waiting:
            self._table = None
        return table


def _of_its_own(initializer: Any, first: int, size: int, rows: int, width: int) -> Any:
    """Returns the initializer of one shard: another seed, and the variance of the whole table."""
    seed = getattr(initializer, "seed", None)
    if not isinstance(seed, int):
        return initializer  # Constants; seed generators, which differ at each call; functions of the user.
    own = type(initializer).from_config({**initializer.get_config(), "seed": (seed + first) % 2**31})
    if isinstance(own, keras.initializers.VarianceScaling):
        # Keras divides the scale by rows, by columns, or by their mean; here the rows are those of the shard.
        means = {"fan_in": (size, rows), "fan_out": (1, 1)}
        ours, whole = means.get(own.mode, (size + width, rows + width))
        own.scale *= ours / whole
    return own
