"""Plain data - numbers, texts, arrays, and lists, tuples and dicts of them - as JSON and a list of arrays.

So are the functions of `keras.ops`: callbacks of Keras keep one to compare numbers with.
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np

_ATOMS = (type(None), bool, int, float, str)


class NotPlainError(TypeError):
    """Raised for what is no plain data."""


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """Makes something that JSON can hold.

    Args:
        value: The data.
        arrays: Takes the arrays in it.

    Raises:
        NotPlainError: if there is something else in it.
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
    raise NotPlainError(f"no plain data: {type(value).__name__}")


def decode(coded: Any, arrays: list[np.ndarray]) -> Any:
    """Returns what `encode` was given.

    Args:
        coded: What it returned.
        arrays: The arrays that it made.
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
    """Whether something is plain data."""
    try:
        encode(value, [])
    except NotPlainError:
        return False
    return True


def fingerprint(value: Any) -> bytes:
    """Returns a hash of plain data: the same for what is the same, bit for bit.

    Raises:
        NotPlainError: if there is something else in it.
    """
    arrays: list[np.ndarray] = []
    digest = hashlib.sha256(repr(encode(value, arrays)).encode())
    for array in arrays:
        digest.update(repr((array.dtype.name, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
