"""Saves and restores the state of the other callbacks: their attributes that training changes."""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.found_objects import is_of_user
from tfdistkit.callbacks.backup.model_state import all_variables_of, equal_variables_in, raw_of, value_of
from tfdistkit.callbacks.backup.of_callbacks.script_variables import (
    CONTAINERS,
    ScriptVariable,
    is_small,
    script_variables,
)
from tfdistkit.callbacks.backup.of_callbacks.unsaved import NOT_STATE, Unsaved, identities
from tfdistkit.callbacks.backup.plain_data import NotPlainError, fingerprint

_LOG = logging.getLogger(__name__)

# Keras's callbacks that call functions of the user's.
_OF_FUNCTIONS = (keras.callbacks.LambdaCallback, keras.callbacks.LearningRateScheduler)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
# Under which the state of a callback has the values of variables: no attribute has such a name.
_VALUES = "values of variables"


class CallbackStates:
    """Tracks the state of callbacks.

    A callback with the methods `get_state()` and `set_state(state)` defines its own state, as plain data. The state
    of every other callback is the attributes that have changed since training began, if they are plain data:
    numbers, texts, arrays, and lists, tuples and dicts of them; the variables of the script that its functions change;
    and the variables, changed since then, of models and optimizers that only callbacks have. Callbacks inside a
    callback are included. A warning names what has changed in the others: objects, and what functions read.

    Args:
        callbacks: The callbacks, after their `on_train_begin`.
        model: The model that is trained.
    """

    def __init__(self, callbacks: list[keras.callbacks.Callback], model: keras.Model):
        self._callbacks = _by_name(callbacks)
        self._at_begin = {name: _attributes(one) for name, one in self._callbacks.items()}
        self._variables = {name: _variables(one) for name, one in self._callbacks.items()}
        self._variables_at_begin = {name: _values(ones) for name, ones in self._variables.items()}
        self._saved = identities(all_variables_of(model))
        self._tensors = {name: self._tensors_of(name, one) for name, one in self._callbacks.items()}
        self._tensors_at_begin = {name: _hashes(ones) for name, ones in self._tensors.items()}
        looked_at = {name: one for name, one in self._callbacks.items() if _is_looked_through(one)}
        self._unsaved = Unsaved(looked_at, self._variables, self._saved, model)

    def warn_of_unsaved(self, in_epoch: bool) -> None:
        """Warns, once, of what training has changed, and a backup does not hold.

        Args:
            in_epoch: Whether the backup is one within an epoch.
        """
        self._unsaved.warn(in_epoch)

    def end_first_step(self) -> None:
        """Notes what the first step has set in the model."""
        self._unsaved.end_first_step()

    def get(self) -> dict[str, Any]:
        """Returns copies of the states, by class name and position among the callbacks of the class."""
        return {name: copy.deepcopy(self._get_one(name, one)) for name, one in self._callbacks.items()}

    def put(self, states: dict[str, Any]) -> None:
        """Restores the states of an earlier run."""
        for name, state in states.items():
            callback = self._callbacks.get(name)
            if callback is None:
                if state:
                    _LOG.warning("The backup has a state for %s, which is missing in the list of callbacks.", name)
            elif _has_own_state(callback):
                callback.set_state(copy.deepcopy(state))
            else:
                own = dict(state)
                _assign(name, self._tensors[name], own.pop(_VALUES, {}))
                _put_attributes(callback, self._variables[name], copy.deepcopy(own))

    def _get_one(self, name: str, callback: Any) -> Any:
        if _has_own_state(callback):
            return callback.get_state()
        begin, variables = self._at_begin[name], self._variables[name]
        state = {key: getattr(callback, key) for key, now in _attributes(callback).items() if begin.get(key) != now}
        begin = self._variables_at_begin[name]
        now_values = _values({key: one for key, one in variables.items() if key in begin and one.is_state})
        state.update({key: variables[key].value for key, now in now_values.items() if begin[key] != now})
        tensors, at_begin = self._tensors[name], self._tensors_at_begin[name]
        changed = [i for i, now in enumerate(_hashes(tensors)) if now != at_begin[i]]
        return {**state, **({_VALUES: {i: value_of(tensors[i]) for i in changed}} if changed else {})}

    def _tensors_of(self, name: str, callback: Any) -> list[Any]:
        """Returns the variables that a callback, and none before it, has; from now on they are saved."""
        if not _is_looked_through(callback):
            return []
        values = [value for key, value in vars(callback).items() if key not in NOT_STATE]
        values += [one.value for one in self._variables[name].values()]
        _build_optimizers(values)
        found = [one for one in equal_variables_in(values) if id(raw_of(one)) not in self._saved]
        self._saved |= identities(found)
        return found


def _by_name(callbacks: list[keras.callbacks.Callback]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for one in callbacks:
        kind = type(one).__name__
        number = sum(name.partition("#")[0] == kind for name in named)
        named[f"{kind}#{number}"] = one
        for name, inner in _by_name(_inside(one)).items():
            named[f"{kind}#{number}/{name}"] = inner
    return named


def _inside(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that a callback wraps: `ChiefOnly` one, `StopTogether` several."""
    kept = [one for value in vars(callback).values() for one in (value if type(value) is list else [value])]
    return [one for one in kept if isinstance(one, keras.callbacks.Callback) and one is not callback]


def _has_own_state(callback: Any) -> bool:
    return callable(getattr(callback, "get_state", None)) and callable(getattr(callback, "set_state", None))


def _is_looked_through(callback: Any) -> bool:
    """Returns whether a callback may have state other than plain data in its attributes, and does not say itself."""
    return not _has_own_state(callback) and (is_of_user(type(callback)) or isinstance(callback, _OF_FUNCTIONS))


def _variables(callback: Any) -> dict[str, ScriptVariable]:
    """Returns the variables of the script that belong to a callback, but for those with the size of a dataset."""
    if not _is_looked_through(callback):
        return {}
    return {key: one for key, one in script_variables(callback).items() if is_small(one.value)}


def _values(variables: dict[str, ScriptVariable]) -> dict[str, bytes]:
    """Returns hashes of the variables that are plain data."""
    found: dict[str, bytes] = {}
    for key, variable in variables.items():
        with contextlib.suppress(NotPlainError):
            found[key] = fingerprint(variable.value)
    return found


def _hashes(variables: list[Any]) -> list[bytes]:
    return [fingerprint(value_of(one)) for one in variables]


def _build_optimizers(values: list[Any]) -> None:
    """Builds the optimizers of compiled models, as their `fit` does, so that they can be restored before it."""
    for one in (inner for value in values for inner in (value if isinstance(value, (list, tuple)) else [value])):
        optimizer = getattr(one, "optimizer", None) if isinstance(one, keras.Model) and one.built else None
        if optimizer is not None and not optimizer.built:
            with one.distribute_strategy.scope():
                optimizer.build(one.trainable_variables)


def _assign(name: str, variables: list[Any], values: dict[int, np.ndarray]) -> None:
    """Restores variables that only a callback has; all ranks call it."""
    for number, value in values.items():
        one = variables[number] if number < len(variables) else None
        if one is None or (tuple(one.shape), raw_of(one).dtype.as_numpy_dtype) != (value.shape, value.dtype):
            _LOG.warning("The backup has other variables than the models and optimizers that only %s has.", name)
            return
    for number, value in values.items():
        variables[number].assign(tf.constant(value, dtype=raw_of(variables[number]).dtype))


def _attributes(callback: Any) -> dict[str, bytes]:
    """Returns hashes of the attributes that are plain data; hashes, because some are large arrays."""
    found: dict[str, bytes] = {}
    if _has_own_state(callback):
        return found
    for key, value in {**_of_class(type(callback)), **_of_slots(callback), **vars(callback)}.items():
        with contextlib.suppress(NotPlainError):
            if key not in NOT_STATE:
                found[key] = fingerprint(value)
    return found


def _of_class(own: type) -> dict[str, Any]:
    """Returns the containers that a class of the user's has as attributes: `losses = []` in its body."""
    classes = [one for one in reversed(own.__mro__) if is_of_user(one)]
    values = {key: value for one in classes for key, value in vars(one).items() if not key.startswith("__")}
    return {key: value for key, value in values.items() if isinstance(value, CONTAINERS)}


def _of_slots(callback: Any) -> dict[str, Any]:
    """Returns the attributes that classes of the user's keep in `__slots__`."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(callback).__mro__ if is_of_user(kind)]
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _put_attributes(callback: Any, variables: dict[str, ScriptVariable], state: dict[str, Any]) -> None:
    """Restores attributes and variables; containers as the same objects, because the script may hold them, too."""
    for key, value in state.items():
        if key in variables:
            before = variables[key].value
            if (now := _filled(before, value)) is not before:
                variables[key].assign(now)
            continue
        before = getattr(callback, key, None)
        if (now := _filled(before, value)) is not before:
            setattr(callback, key, now) if key in _of_slots(callback) else vars(callback).update({key: now})


def _filled(before: Any, value: Any) -> Any:
    """Returns a container with other contents, and a value of another kind as it is."""
    if type(before) is not type(value) or not isinstance(before, (*CONTAINERS, *_NAMESPACES)):
        return value
    if isinstance(before, _NAMESPACES):
        vars(before).clear()
        vars(before).update(vars(value))
        return before
    if isinstance(before, np.ndarray):
        # One without memory of its own may be that of a variable.
        if (before.shape, before.dtype) != (value.shape, value.dtype) or not before.flags.owndata:
            return value
        before[...] = value
    elif isinstance(before, dict):
        items = {key: _filled(before.get(key), one) for key, one in value.items()}
        before.clear()
        before.update(items)
    elif isinstance(before, set):
        before.clear()
        before.update(value)
    else:
        parts = [_filled(*pair) for pair in zip(before, value)]
        rest = list(value)[len(parts) :]
        before.clear()
        before.extend([*parts, *rest])
    return before
