"""The numbers that a table in several parts starts with: those that it would start with in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

# A larger table is never in one place. Below it, one is made, cut into its parts and forgotten.
_LARGEST_WHOLE_BYTES = 2**30


def initializers_of_parts(initializer: Any, first_rows: Sequence[int], width: int, row_bytes: int) -> list[Any]:
    """Makes the initializers of the parts of a table.

    Args:
        initializer: The initializer of the table.
        first_rows: The first row of each part, and at the end the number of rows.
        width: Columns of the table.
        row_bytes: Bytes of a row.

    Returns:
        One initializer for each part. Up to 1 GiB, together they give what `initializer` gives for the table in
        one variable. Beyond it, each part has random numbers of its own, of the same distribution.
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
    """A table that is made when the first of its parts is asked for, and forgotten after the last one."""

    def __init__(self, initializer: Any, shape: tuple[int, int], first_rows: Sequence[int]):
        self._initializer = initializer
        self._shape = shape
        self._first_rows = first_rows
        self._waiting: set[int] = set()
        self._table: Any = None

    def part(self, first: int) -> Callable[..., Any]:
        """Returns the initializer of the part that begins with a row."""

        def rows(shape: Any, dtype: Any = None) -> Any:
            # Not on a parameter server: what is sent to each of them is its part.
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
    """Returns the initializer of one part: another seed, and the variance that the whole table would have."""
    seed = getattr(initializer, "seed", None)
    if not isinstance(seed, int):
        return initializer  # Constants; generators, which give other numbers each time; functions of the user.
    own = type(initializer).from_config({**initializer.get_config(), "seed": (seed + first) % 2**31})
    if isinstance(own, keras.initializers.VarianceScaling):
        # The scale is divided by rows, by columns, or by the mean of both; here these are those of a part.
        means = {"fan_in": (size, rows), "fan_out": (1, 1)}
        ours, whole = means.get(own.mode, (size + width, rows + width))
        own.scale *= ours / whole
    return own
