"""Checks what the reducer of a user returns: TensorFlow would apply too few gradients without a word."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.reducer import Reducer
from tfdistkit.errors import UnsupportedError, explain


def checked_sums(reducer: Reducer, sums: Any, parts: list[Any]) -> list[Any]:
    """Returns what a reducer made of the gradients: one for each, of its shape and dtype.

    Args:
        reducer: The reducer.
        sums: The result of its `reduce`.
        parts: This replica's part of each gradient.

    Raises:
        UnsupportedError: for anything else, with which some variables would not be trained.
    """
    expected = f"{len(parts)} gradients in the order of the variables, of their shapes and dtypes"
    if not isinstance(sums, (list, tuple)) or len(sums) != len(parts):
        many = f"{len(sums)} gradients" if isinstance(sums, (list, tuple)) else f"a {type(sums).__name__}"
        raise _wrong_sums(reducer, many, expected)
    for number, (total, part) in enumerate(zip(sums, parts)):
        if not isinstance(total, (tf.Tensor, tf.Variable, tf.IndexedSlices)):
            raise _wrong_sums(reducer, f"a {type(total).__name__} for gradient {number}", expected)
        if total.dtype != part.dtype or not total.shape.is_compatible_with(part.shape):
            had = f"{total.dtype.name} {total.shape} for gradient {number}, which is {part.dtype.name} {part.shape}"
            raise _wrong_sums(reducer, had, expected)
    return list(sums)


def _wrong_sums(reducer: Reducer, received: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"{type(reducer).__name__}.reduce must return the gradient of each variable.",
            received=received,
            expected=expected,
        )
    )
