"""Tells what training changes and a backup does not hold: in callbacks, in the model's flags and in metrics."""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import logging
import pickle
import queue
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.found_objects import is_of_user
from tfdistkit.callbacks.backup.model_state import equal_variables_in, raw_of
from tfdistkit.callbacks.backup.of_callbacks.random_numbers import draws_of
from tfdistkit.callbacks.backup.of_callbacks.script_variables import CONTAINERS, ScriptVariable, is_holder, is_small
from tfdistkit.callbacks.backup.plain_data import fingerprint, is_plain
from tfdistkit.callbacks.backup.source_files import is_of_script
from tfdistkit.errors import explain
from tfdistkit.keras_adapter import private_api

_LOG = logging.getLogger(__name__)

# Attributes that Keras sets on every callback.
NOT_STATE = ("params", "_model", "validation_data")
# What has variables.
_OF_KERAS = (keras.layers.Layer, keras.metrics.Metric, keras.optimizers.Optimizer)
# How much of other objects is compared: items of a list, numbers of an array, objects inside each other.
_MOST, _MOST_VALUES, _DEEPEST = 30, 10_000, 4


class Unsaved:
    """Compares what a backup does not hold with how it was when training began.

    Args:
        callbacks: The callbacks that do not define their own state.
        variables: The variables of the script that they use.
        saved: The identities of the variables that the backup holds.
        model: The model that is trained.
    """

    def __init__(
        self, callbacks: dict[str, Any], variables: dict[str, dict[str, ScriptVariable]], saved: frozenset[int],
        model: keras.Model,
    ):  # fmt: skip
        self._callbacks, self._variables, self._saved, self._model = callbacks, variables, saved, model
        # None: told, or not to be told.
        self._known: dict[str, dict[str, bytes | None]] = {
            name: {**self._inside_of(name, one)} for name, one in callbacks.items()
        }
        self._flags: list[bool] | None = None
        self._metrics: dict[str, bytes] = {}
        self._draws = draws_of(model, list(callbacks.values()))

    def end_first_step(self) -> None:
        """Notes what the first step has set: flags while it was traced, caches of metrics."""
        self._flags, self._metrics = _flags(self._model), _metrics(self._model)

    def warn(self, in_epoch: bool) -> None:
        """Warns, once, of what has changed.

        Args:
            in_epoch: Whether the backup is one within an epoch, so that metrics go on from it.
        """
        for name, callback in self._callbacks.items():
            if changed := self._changed(name, callback):
                _LOG.warning(
                    explain(
                        "The state of a callback should be plain data in its attributes, or in variables of the script "
                        "that its functions change: a backup holds nothing else, so that a resumed training begins "
                        "with what the script makes.",
                        received=f"changes in `{', '.join(changed)}` of {type(callback).__name__}",
                        do="Add the methods `get_state()`, which returns plain data, and `set_state(state)`.",
                    )
                )
        if self._draws:
            _LOG.warning(
                explain(
                    "Random numbers should come from a generator whose state a backup holds: a resumed training draws "
                    "others.",
                    received=", ".join(self._draws),
                    do="Draw from a generator in an attribute: keras.random.SeedGenerator(1) in a layer or model, "
                    "np.random.default_rng(1) in a callback.",
                )
            )
            self._draws = []
        self._warn_of_model(in_epoch)

    def _warn_of_model(self, in_epoch: bool) -> None:
        if self._flags is not None and self._flags != _flags(self._model):
            self._flags = None
            _LOG.warning(
                explain(
                    "`trainable` of layers should not change within a `fit`: it has no effect on the steps that are "
                    "already traced, but a resumed training traces them anew, and trains other weights.",
                    received=f"a change of `trainable` in {self._model.name!r}",
                    do="Train in phases, one `fit` for each, and call `compile` in between.",
                )
            )
        now = _metrics(self._model) if in_epoch else {}
        if changed := [name for name, value in self._metrics.items() if now.get(name, value) != value]:
            self._metrics = {}
            _LOG.warning(
                explain(
                    "The state of a metric should be in its variables (`add_weight`): a backup holds nothing else, so "
                    "that the epoch which is resumed ends with another result.",
                    received=f"Python objects in {', '.join(changed)} that change",
                    do="Save at the end of epochs only, or keep the numbers in variables.",
                )
            )

    def _changed(self, name: str, callback: Any) -> list[str]:
        now, known = self._inside_of(name, callback), self._known[name]
        for key in now.keys() - known.keys():  # Made in training.
            variable = self._variables[name].get(key)
            is_lost = self._is_state(variable.value if variable else vars(callback).get(key))
            known[key] = b"" if is_lost else None
        changed = [key for key, value in now.items() if known[key] not in (None, value)]
        known.update(dict.fromkeys(changed))
        return changed

    def _is_state(self, value: Any) -> bool:
        """Returns whether an object that was made in training is state: of the script, a container, or variables."""
        is_own = is_of_user(type(value)) and is_of_script(type(value))
        return is_own or isinstance(value, (*CONTAINERS, tuple)) or self._has_variables(value)

    def _has_variables(self, value: Any) -> bool:
        return any(id(one) not in self._saved for one in equal_variables_in([value]))

    def _inside_of(self, name: str, callback: Any) -> dict[str, bytes]:
        """Returns hashes of the plain data inside what is not plain data itself, by the name of the attribute."""
        restored = {key: one for key, one in self._variables[name].items() if one.is_state and is_plain(one.value)}
        read = {key: one.value for key, one in self._variables[name].items() if key not in restored}
        saved = self._saved | identities(_variables_now(self._model))
        saved |= frozenset(one.place for one in restored.values() if one.place)
        values = {key: value for key, value in vars(callback).items() if key not in NOT_STATE and not is_plain(value)}
        values.update({key: value for key, value in read.items() if _is_looked_into(key, value)})
        return {key: fingerprint(_plain_inside(value, saved)) for key, value in values.items()}


def identities(variables: list[Any]) -> frozenset[Any]:
    """Returns the identities of variables, both as Keras's and as TensorFlow's."""
    return frozenset(id(kind) for one in variables for kind in (one, raw_of(one)))


def _variables_now(model: keras.Model) -> list[Any]:
    """Returns the variables of a model and its optimizer, also those that were created after training began."""
    return [*model.variables, *getattr(getattr(model, "optimizer", None), "variables", ())]


def _flags(model: keras.Model) -> list[bool]:
    return [layer.trainable for layer in private_api.layers_of(model)]


def _metrics(model: keras.Model) -> dict[str, bytes]:
    """Returns hashes of what metrics of the script keep, but for their variables."""
    given = keras.tree.flatten(list(private_api.compile_arguments(model).values()))
    found: dict[str, bytes] = {}
    for one in (*given, *vars(model).values()):
        if isinstance(one, keras.metrics.Metric) and is_of_user(type(one)):
            values = {key: value for key, value in vars(one).items() if not key.startswith("_")}
            found[one.name] = fingerprint(_plain_inside(values, identities(one.variables)))
    return found


def _is_looked_into(key: str, value: Any) -> bool:
    """Returns whether a change inside a variable of the script is lost: not that of the script's data, or of what has
    variables of its own."""
    is_attribute = "." in key.rpartition(": ")[2]
    if isinstance(value, (types.ModuleType, type)):
        return False
    if is_attribute or isinstance(value, (*_OF_KERAS, tf.Variable, keras.Variable)) or is_holder(value):
        return True
    has_variables = isinstance(value, CONTAINERS) and len(equal_variables_in([value])) > 0
    return is_small(value) and (has_variables or is_plain(value))


def _plain_inside(value: Any, saved: frozenset[Any], depth: int = 0) -> Any:
    """Returns plain data that changes when an object changes; large arrays, and what lies deep, are left out.

    Args:
        value: The object.
        saved: The identities of variables that are saved in any case, and of attributes: of the object, and the name.
        depth: How deep it lies in another one.
    """
    if depth > _DEEPEST or id(value) in saved:
        return None
    inner = functools.partial(_plain_inside, saved=saved, depth=depth + 1)
    if isinstance(value, (tf.Variable, keras.Variable)):
        raw = value.value if isinstance(value, keras.Variable) else value
        # The part of this replica: reading what is summed over the ranks is a collective, and only the chief is here.
        return inner(getattr(raw, "values", (raw,))[0].numpy())
    if isinstance(value, tf.Tensor):
        return None if tf.is_symbolic_tensor(value) else inner(value.numpy())
    if isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value).tolist() if value.dtype.kind in "SUO" and value.size <= _MOST_VALUES else value
        is_hashed = not isinstance(value, np.ndarray) or value.size <= _MOST_VALUES
        return value if is_hashed and is_plain(value) else getattr(value, "size", None)
    if isinstance(value, _OF_KERAS):
        own = [*value.variables, *getattr(getattr(value, "optimizer", None), "variables", ())]
        return [inner(one) for one in itertools.islice((one for one in own if id(one) not in saved), _MOST)]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return [len(value), *(inner(one) for one in itertools.islice(value, _MOST))]
    if isinstance(value, dict):
        return [len(value), *(inner(one) for one in itertools.islice(value.values(), _MOST))]
    if isinstance(value, queue.Queue):
        return inner(list(value.queue))
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return None if frame is None else [frame.f_lasti, inner(dict(frame.f_locals))]
    if _has_attributes(value):
        return {key: inner(one) for key, one in vars(value).items() if (id(value), key) not in saved}
    if is_plain(value):
        return value
    return _position(value) if hasattr(type(value), "__next__") else None


def _has_attributes(value: Any) -> bool:
    kinds = (types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList)
    own = isinstance(value, (*kinds, tf.train.ExponentialMovingAverage))
    return own or (is_of_user(type(value)) and hasattr(value, "__dict__"))


def _position(iterator: Any) -> Any:
    """Returns what changes when an iterator of Python moves on: `iter(list)`, `itertools.count()`."""
    try:
        return np.frombuffer(pickle.dumps(iterator), np.uint8).copy()
    except Exception:  # An object of a library may raise anything.
        return None
