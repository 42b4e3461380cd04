"""Counts the rows of the tensors of a batch."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data import rows


def count_rows(values: Any, is_of_batch: list[bool] | None = None) -> tuple[tf.Tensor | None, int | None]:
    """Returns the number of rows of a batch, from its first value with a batch dimension.

    Args:
        values: Any structure of tensors, also ragged and sparse ones, the values of one replica.
        is_of_batch: For each value, whether it differs between replicas. If any does, the others are ignored.

    Returns:
        The rows as a scalar float32 tensor (None if no value has a batch dimension), and as an int if they are known
        while tracing (else None).
    """
    for value in _of_batch(values, is_of_batch):
        counted = rows.count_rows(value)
        if counted is not None:
            return tf.cast(counted[0], tf.float32), counted[1]
    return None, None


def same_rows(values: Any, is_of_batch: list[bool] | None = None) -> tf.Operation | None:
    """Checks that all tensors of a batch given to `strategy.run` have the same number of rows.

    Args:
        values: As in `count_rows`.
        is_of_batch: As in `count_rows`.

    Returns:
        An operation that fails if they differ, where the rows are known only at run time; else None.

    Raises:
        OptionError: if the static numbers of rows differ.
    """
    counted = [count for value in _of_batch(values, is_of_batch) if (count := rows.count_rows(value)) is not None]
    static = sorted({known for _, known in counted if known is not None})
    if len(static) > 1:
        raise rows.which_is_the_batch(" and ".join(map(str, static)))
    dynamic = [count for count, known in counted if known is None]
    if not dynamic or len(counted) == 1:
        return None
    return rows.assert_same([*static, *dynamic])


def _of_batch(values: Any, is_of_batch: list[bool] | None) -> list[Any]:
    flat = tf.nest.flatten(values)
    if is_of_batch is None or len(is_of_batch) != len(flat) or not any(is_of_batch):
        return flat
    return [value for value, is_own in zip(flat, is_of_batch) if is_own]
