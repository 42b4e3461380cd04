"""Variables of the script that the functions of a callback use: globals, closures, attributes of the script's objects.

`losses.append(...)` on a list of the script is state of the training, as `self.losses.append(...)` is. A variable that
a function only reads may belong to something else, such as the data, so the two are told apart by the function's code.
"""

from __future__ import annotations

import collections
import dis
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.found_objects import is_of_user, methods_of
from tfdistkit.callbacks.backup.source_files import is_of_script

CONTAINERS = (list, dict, set, collections.deque, np.ndarray)
_MOST_FUNCTIONS = 200
_MOST_VALUES = 1_000_000
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
# Methods of containers that change them.
_MUTATORS = frozenset(
    "add append appendleft clear difference_update discard extend extendleft fill insert intersection_update pop "
    "popitem popleft remove reverse rotate setdefault sort subtract symmetric_difference_update update".split()
)
_STORES_ITEM = {"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
_STORES_NAME = {"STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR"}
_OF_KERAS = (tf.Module, keras.layers.Layer, keras.metrics.Metric, keras.losses.Loss, keras.optimizers.Optimizer)


@dataclass(frozen=True)
class ScriptVariable:
    """A variable outside of a callback.

    Args:
        read: Returns its value; raises a LookupError or ValueError if it has none.
        assign: Sets it.
        is_assigned: Whether the code that uses it assigns it.
        is_changed_inside: Whether the code that uses it changes a container.
    """

    read: Callable[[], Any]
    assign: Callable[[Any], None]
    is_assigned: bool
    is_changed_inside: bool

    def also(self, other: ScriptVariable) -> ScriptVariable:
        """Returns the variable as two functions use it."""
        is_changed_inside = self.is_changed_inside or other.is_changed_inside
        return replace(self, is_assigned=self.is_assigned or other.is_assigned, is_changed_inside=is_changed_inside)

    @property
    def value(self) -> Any:
        """Its value; None if it has none."""
        try:
            return self.read()
        except (LookupError, ValueError):
            return None

    @property
    def is_state(self) -> bool:
        """Whether it is state of the callback: the code that uses it changes it."""
        return self.is_assigned or (self.is_changed_inside and isinstance(self.value, CONTAINERS))


def script_variables(callback: keras.callbacks.Callback) -> dict[str, ScriptVariable]:
    """Returns the variables that the functions of a callback use, by names that are the same in each run.

    Args:
        callback: The callback; functions of libraries in it are left out.
    """
    found = _of_classes(type(callback))
    waiting = collections.deque([*methods_of(type(callback)), *vars(callback).values()])
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        value = waiting.popleft()
        if isinstance(value, functools.partial):
            waiting.append(value.func)
        function = getattr(value, "__func__", value)
        if not isinstance(function, types.FunctionType) or id(function) in seen or not is_of_script(function):
            continue
        seen.add(id(function))
        waiting.append(getattr(function, "__wrapped__", None))
        for name, variable in _used_by(function, getattr(value, "__self__", None)):
            found[name] = variable if name not in found else variable.also(found[name])
            if isinstance(variable.value, _CALLABLES):
                waiting.append(variable.value)
    return found


def is_holder(value: Any) -> bool:
    """Returns whether a value is a module, a class or an object of the script, whose attributes may be variables."""
    if isinstance(value, types.ModuleType):
        return is_of_script(value)
    own = value if isinstance(value, type) else type(value)
    if isinstance(value, (*_OF_KERAS, *_CALLABLES)) or not is_of_user(own) or not hasattr(value, "__dict__"):
        return False
    # What is iterated over is data, whose position a backup knows.
    is_data = isinstance(value, keras.utils.PyDataset) or hasattr(own, "__iter__") or hasattr(own, "__next__")
    return not is_data and is_of_script(own)


def is_small(value: Any) -> bool:
    """Returns whether plain data has at most a million numbers: with more, it is data, and no state of a callback."""
    left, waiting = _MOST_VALUES, [value]
    while waiting and left >= 0:
        one = waiting.pop()
        if isinstance(one, (np.ndarray, tf.Tensor)):
            left -= int(np.prod(one.shape))
        elif isinstance(one, (str, bytes)):
            left -= len(one)
        elif isinstance(one, (dict, list, tuple, set, frozenset, collections.deque)):
            left -= len(one)
            waiting += (one.values() if isinstance(one, dict) else one) if left >= 0 else ()
    return left >= 0


def _of_classes(own: type) -> dict[str, ScriptVariable]:
    """Returns the numbers and texts that classes of the script have as attributes."""
    classes = [one for one in own.__mro__ if is_of_user(one) and is_of_script(one)]
    names = [(one, key) for one in classes for key, value in vars(one).items() if isinstance(value, (int, float, str))]
    return {f"{one.__qualname__}.{key}": _of_holder(one, key, True, False) for one, key in names if key[:2] != "__"}


def _used_by(function: types.FunctionType, bound: Any) -> Iterator[tuple[str, ScriptVariable]]:
    """Yields the variables that a function uses, and the attributes of what it uses."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    codes = list(_codes(function.__code__))
    holders = {type(bound).__qualname__: bound} if bound is not None and is_holder(bound) else {}
    for code in codes:
        instructions = list(dis.get_instructions(code))
        for name in sorted({one.argval for one in instructions if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}):
            label = f"{function.__module__}: {name}"
            variable = _of_global(function.__globals__, name, *_changes(instructions, name))
            if name in function.__globals__ or variable.is_assigned:  # The others are of Python: `len`.
                yield label, variable
                holders.update({label: variable.value} if is_holder(variable.value) else {})
        for name in sorted(set(code.co_freevars) & set(cells)):
            label = f"{function.__qualname__}: {name}"
            variable = _of_cell(cells[name], *_changes(instructions, name))
            yield label, variable
            holders.update({label: variable.value} if is_holder(variable.value) else {})
    for label, holder in holders.items():
        for code in codes:
            for name in sorted(set(code.co_names) & set(vars(holder))):
                changes = _changes(list(dis.get_instructions(code)), name)
                yield f"{label}.{name}", _of_holder(holder, name, *changes)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _changes(instructions: list[dis.Instruction], name: str) -> tuple[bool, bool]:
    """Returns whether code assigns a variable, and whether it changes containers."""
    is_assigned = any(one.opname in _STORES_NAME and one.argval == name for one in instructions)
    is_changed = any(one.opname in _STORES_ITEM or one.argval in _MUTATORS for one in instructions)
    return is_assigned, is_changed


def _of_global(values: dict[str, Any], name: str, *changes: bool) -> ScriptVariable:
    return ScriptVariable(lambda: values[name], lambda value: values.__setitem__(name, value), *changes)


def _of_cell(cell: types.CellType, *changes: bool) -> ScriptVariable:
    return ScriptVariable(lambda: cell.cell_contents, lambda value: setattr(cell, "cell_contents", value), *changes)


def _of_holder(holder: Any, name: str, *changes: bool) -> ScriptVariable:
    return ScriptVariable(lambda: vars(holder)[name], lambda value: setattr(holder, name, value), *changes)
