"""Encodes plain data - numbers, texts, arrays, and lists, tuples and dicts of them - as JSON and a list of arrays.

Functions of `keras.ops` count as plain data: Keras callbacks store one to compare numbers with.
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np

_ATOMS = (type(None), bool, int, float, str)


class NotPlainError(TypeError):
    """A value is not plain data."""


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Encodes plain data for JSON.

    Args:
        value: The data.
        arrays: Receives the arrays in it.

    Raises:
        NotPlainError: if a value in it is not plain data.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufcV" and not value.dtype.hasobject:
        arrays.append(np.asarray(value))
        return {"array" if isinstance(value, np.ndarray) else "number": len(arrays) - 1}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(one, arrays) for one in value]}
    if type(value) is dict:
        return {"dict": [[encode(key, arrays), encode(one, arrays)] for key, one in value.items()]}
    name = getattr(value, "__name__", "")
    if callable(value) and getattr(keras.ops, name, None) is value:
        return {"op": name}
    raise NotPlainError(f"not plain data: {type(value).__name__}")


def decode(coded: Any, arrays: list[np.ndarray]) -> Any:
    """Decodes the result of `encode`.

    Args:
        coded: The encoded data.
        arrays: The arrays that `encode` collected.
    """
    if not isinstance(coded, dict):
        return coded
    ((kind, value),) = coded.items()
    if kind == "array":
        return arrays[value].copy()
    if kind == "number":
        return arrays[value][()]
    if kind == "op":
        return getattr(keras.ops, value)
    if kind == "dict":
        return {decode(key, arrays): decode(one, arrays) for key, one in value}
    items = [decode(one, arrays) for one in value]
    return items if kind == "list" else tuple(items)


def is_plain(value: Any) -> bool:
    """Returns whether a value is plain data."""
    try:
        encode(value, [])
    except NotPlainError:
        return False
    return True


def fingerprint(value: Any) -> bytes:
    """Returns a hash of plain data, equal for values that are equal bit for bit.

    Raises:
        NotPlainError: if a value in it is not plain data.
    """
    arrays: list[np.ndarray] = []
    digest = hashlib.sha256(repr(encode(value, arrays)).encode())
    for array in arrays:
        digest.update(repr((array.dtype.name, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
