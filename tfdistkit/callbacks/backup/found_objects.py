"""Finds the optimizers and variables of a training that Keras does not list.

They are in attributes of models, layers, losses and the user's own objects, in lists and dicts of them, and in what the
user's functions read: closures and globals. The order is the same in every process that runs the same script.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import private_api

_DEEPEST, _MOST = 6, 100_000
# Their objects and functions hold nothing of the user's, but for losses that are made of the user's functions.
_LIBRARIES = {"keras", "tensorflow", "tfdistkit", "numpy", "horovod", "builtins", *sys.stdlib_module_names}
_LIBRARIES -= {"__main__"}
_ATOMS = (type(None), bool, int, float, str, bytes, np.ndarray, np.generic, tf.Tensor)


# What was found for a model whose training is backed up: looking through 500 layers takes 0.1 s.
_kept: weakref.WeakKeyDictionary[keras.Model, list[Any]] = weakref.WeakKeyDictionary()


def keep_found(model: keras.Model) -> None:
    """Looks for what the training of a model uses, and keeps it for `found_in` until `forget_found`."""
    _kept[model] = _look_in(model)


def forget_found(model: keras.Model) -> None:
    """Lets `found_in` look anew each time."""
    _kept.pop(model, None)


def found_in(model: keras.Model) -> list[Any]:
    """Returns optimizers, Keras variables and TensorFlow variables that the training of a model may use.

    Args:
        model: The model that `fit` trains.
    """
    return _kept[model] if model in _kept else _look_in(model)


def _look_in(model: keras.Model) -> list[Any]:
    layers = private_api.layers_of(model)
    roots = [one for layer in layers for one in (*methods_of(type(layer)), *vars(layer).values())]
    return found_from([*roots, private_api.compile_arguments(model).get("loss")], layers)


def found_from(roots: Iterable[Any], known: Iterable[Any] = ()) -> list[Any]:
    """Returns optimizers, Keras variables and TensorFlow variables that objects are or hold.

    The nearest come first; each object is looked through once, and not deeper than a limit.

    Args:
        roots: The objects.
        known: Objects that are not looked through.
    """
    seen: dict[int, Any] = {id(one): one for one in known}
    waiting = collections.deque((one, 0) for one in roots)
    found = []
    while waiting:
        value, depth = waiting.popleft()
        if isinstance(value, _ATOMS) or id(value) in seen or len(seen) > _MOST:
            continue
        seen[id(value)] = value
        if isinstance(value, (tf.Variable, keras.Variable, keras.optimizers.Optimizer)):
            found.append(value)
        if depth < _DEEPEST:
            waiting.extend((inner, depth + 1) for inner in _inside(value))
    return found


def _inside(value: Any) -> Iterator[Any]:
    """Yields what an object holds that may be, or hold, variables and optimizers."""
    if isinstance(value, (tf.Variable, keras.Variable, type, types.ModuleType)):
        return
    if isinstance(value, keras.optimizers.LossScaleOptimizer):
        return  # The variables of its inner optimizer count as its own.
    if isinstance(value, (tf.random.Generator, keras.random.SeedGenerator)):
        yield value.state
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, (keras.layers.Layer, keras.metrics.Metric)):
        yield from value.variables
        yield from vars(value).values()
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from read_by(value)
    elif isinstance(value, tf.types.experimental.PolymorphicFunction):
        yield getattr(value, "python_function", None)
    elif isinstance(value, (keras.losses.Loss, keras.optimizers.Optimizer)) or is_of_user(type(value)):
        yield from [*vars(value).values(), *methods_of(type(value))] if hasattr(value, "__dict__") else []


def methods_of(kind: type) -> list[Any]:
    """Returns the functions that the user's own classes define."""
    own = [value for one in kind.__mro__ if is_of_user(one) for value in vars(one).values()]
    functions = [getattr(one, "fget", None) or getattr(one, "__func__", one) for one in own]
    return [one for one in functions if callable(one)]


def read_by(function: types.FunctionType) -> list[Any]:
    """Returns what a function of the user's reads from its closure, its defaults and its module; of others nothing."""
    if not is_of_user(function):
        return []
    found = [getattr(function, "__wrapped__", None), *(function.__defaults__ or ())]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # Not yet set.
            continue
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        found += [function.__globals__.get(name) for name in code.co_names]
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return found


def is_of_user(value: Any) -> bool:
    """Returns whether a class or function is the user's own, or of a library that knows nothing of Keras."""
    return str(getattr(value, "__module__", "builtins")).partition(".")[0] not in _LIBRARIES
