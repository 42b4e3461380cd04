"""Encodes plain data as JSON and a list of arrays.

Plain data is numbers, texts, arrays and tensors, lists, tuples, dicts, sets and the like of them, and generators of
random numbers. Functions of `keras.ops` count as plain data: Keras callbacks store one to compare numbers with.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import random
import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_ATOMS = (type(None), bool, int, float, str)
_GENERATORS = {name: getattr(np.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")}


def _generator(parts: tuple[str, Any]) -> np.random.Generator:
    bits = _GENERATORS[parts[0]]()
    bits.state = parts[1]
    return np.random.Generator(bits)


def _old_generator(state: Any) -> np.random.RandomState:
    made = np.random.RandomState()
    made.set_state(state)
    return made


def _python_generator(state: Any) -> random.Random:
    made = random.Random()
    made.setstate(state)
    return made


# What is encoded as other plain data: to it, and back.
_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    collections.OrderedDict: (dict, collections.OrderedDict),
    collections.Counter: (dict, collections.Counter),
    collections.deque: (lambda value: (list(value), value.maxlen), lambda parts: collections.deque(*parts)),
    bytes: (lambda value: np.frombuffer(value, np.uint8).copy(), lambda array: array.tobytes()),
    types.SimpleNamespace: (vars, lambda values: types.SimpleNamespace(**values)),
    argparse.Namespace: (vars, lambda values: argparse.Namespace(**values)),
    set: (lambda value: sorted(value, key=repr), set),
    frozenset: (lambda value: sorted(value, key=repr), frozenset),
    np.random.Generator: (
        lambda value: (type(value.bit_generator).__name__, value.bit_generator.state),
        _generator,
    ),
    np.random.RandomState: (lambda value: value.get_state(), _old_generator),
    random.Random: (lambda value: value.getstate(), _python_generator),
}
_NAMES = {kind.__name__: kind for kind in _KINDS}
# A default is made by one of them.
_FACTORIES: dict[str, Any] = {"NoneType": None, **{kind.__name__: kind for kind in (int, float, list, dict, set, str)}}


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
    if type(value) in _KINDS:
        return {type(value).__name__: encode(_KINDS[type(value)][0](value), arrays)}
    if type(value) is collections.defaultdict and value.default_factory in _FACTORIES.values():
        factory = getattr(value.default_factory, "__name__", "NoneType")
        return {"defaultdict": [factory, encode(dict(value), arrays)]}
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy") and value.dtype.is_numpy_compatible:
        return {"tensor": encode(value.numpy(), arrays)}
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
    if kind == "tensor":
        return tf.constant(decode(value, arrays))
    if kind == "defaultdict":
        return collections.defaultdict(_FACTORIES[value[0]], decode(value[1], arrays))
    if kind in _NAMES:
        return _KINDS[_NAMES[kind]][1](decode(value, arrays))
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
