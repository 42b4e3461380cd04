"""Finds code that draws random numbers from generators whose state no backup can hold.

TensorFlow's operations such as `tf.random.normal` have their state inside of the runtime. Python's and NumPy's global
generators are restored as they were at the start of the epoch, because data draw from them, too; what a callback drew
in the steps that are skipped is not drawn again.
"""

from __future__ import annotations

import dis
import random
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.found_objects import is_of_user, methods_of
from tfdistkit.callbacks.backup.of_callbacks.script_variables import functions_of
from tfdistkit.keras_adapter import private_api

_NAMES = ("normal", "uniform", "truncated_normal", "shuffle", "gamma", "poisson", "categorical")
_OPERATIONS = [getattr(tf.random, name) for name in _NAMES]
_OPERATIONS += [tf.nn.dropout, *(getattr(tf.image, name) for name in dir(tf.image) if name.startswith("random_"))]
_GENERATORS = (random.random.__self__, np.random.random.__self__)  # type: ignore[attr-defined]
_IN_STEPS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def draws_of(model: keras.Model, callbacks: list[keras.callbacks.Callback]) -> list[str]:
    """Returns where random numbers are drawn that a resumed training draws otherwise.

    Args:
        model: The model that is trained.
        callbacks: The callbacks.
    """
    found: dict[str, None] = {}
    kinds = {type(layer): None for layer in private_api.layers_of(model) if is_of_user(type(layer))}
    for kind in kinds:
        found.update(dict.fromkeys(_drawn(methods_of(kind), (), _OPERATIONS)))
    for one in callbacks:
        in_steps = [getattr(type(one), name, None) for name in _IN_STEPS] if is_of_user(type(one)) else []
        in_steps += [vars(one).get(name) for name in _IN_STEPS]
        found.update(dict.fromkeys(_drawn(in_steps, _GENERATORS, [])))
        found.update(dict.fromkeys(_drawn([*methods_of(type(one)), *vars(one).values()], (), _OPERATIONS)))
    return list(found)


def _drawn(values: list[Any], generators: tuple[Any, ...], operations: list[Any]) -> Iterator[str]:
    for function in functions_of(values):
        for name, value in _named_by(function):
            if any(value is one for one in operations) or any(
                getattr(value, "__self__", None) is one for one in generators
            ):
                yield f"{name} in {function.__qualname__}"


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields what a function names: `np.random.normal` by the module's attributes."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        name, value = "", None
        for one in dis.get_instructions(code):
            if one.opname == "LOAD_GLOBAL":
                name, value = one.argval, function.__globals__.get(one.argval)
            elif one.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, types.ModuleType):
                name, value = f"{name}.{one.argval}", getattr(value, one.argval, None)
            else:
                name, value = "", None
            if value is not None:
                yield name, value
