"""Variables of the script that the functions of a callback use: globals, closures, attributes of the script's objects.

`losses.append(...)` on a list of the script is state of the training, as `self.losses.append(...)` is. A variable that
a function only reads may belong to something else, such as the data, so the two are told apart by the function's code.
"""

from __future__ import annotations

import argparse
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
_MOST_HOLDERS = 100
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
        place: The identity of the object whose attribute it is, and the name.
    """

    read: Callable[[], Any]
    assign: Callable[[Any], None]
    is_assigned: bool
    is_changed_inside: bool
    place: tuple[int, str] | None = None

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
    search = _Search({key: value for key, value in vars(callback).items() if is_holder(value)})
    search.found.update(_of_classes(type(callback)))
    search.follow([*methods_of(type(callback)), *vars(callback).values()])
    return search.found


def functions_of(values: list[Any]) -> list[types.FunctionType]:
    """Returns the functions of the script among values, and those that they call.

    Args:
        values: Functions, methods and other values.
    """
    search = _Search({})
    search.follow(values)
    return search.functions


class _Search:
    """Follows functions, and those that they call, to the variables that they use.

    Args:
        own: Objects of the script in attributes of the callback.
    """

    def __init__(self, own: dict[str, Any]) -> None:
        self._own = own
        self.found: dict[str, ScriptVariable] = {}
        self.functions: list[types.FunctionType] = []
        self._seen: set[tuple[int, int]] = set()
        self._waiting: collections.deque[tuple[Any, Any, str]] = collections.deque()

    def follow(self, values: list[Any]) -> None:
        """Looks at the functions among values, with what they are bound to and its name."""
        self._waiting.extend((value, None, "") for value in values)
        while self._waiting and len(self._seen) < _MOST_FUNCTIONS:
            value, bound, label = self._waiting.popleft()
            arguments: list[Any] = []
            if isinstance(value, functools.partial):
                arguments, value = [*value.args, *value.keywords.values()], value.func
            if isinstance(value, types.MethodType):
                bound, label = value.__self__, label or type(value.__self__).__qualname__
            function = getattr(value, "__func__", value)
            key = (id(function), id(bound))
            if not isinstance(function, types.FunctionType) or key in self._seen or not is_of_script(function):
                continue
            self._seen.add(key)
            self.functions.append(function)
            self._waiting.append((getattr(function, "__wrapped__", None), bound, label))
            arguments += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            own = {f"self.{key}": value for key, value in self._own.items() if bound is None}
            self._look_at(function, {label: bound} if is_holder(bound) else own, arguments)

    def _look_at(self, function: types.FunctionType, holders: dict[str, Any], arguments: list[Any]) -> None:
        """Adds the variables that a function uses, and the attributes of what it uses."""
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        codes = list(_codes(function.__code__))
        used: dict[str, ScriptVariable] = {}
        for code in codes:
            instructions = list(dis.get_instructions(code))
            for name in sorted({one.argval for one in instructions if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}):
                variable = _of_global(function.__globals__, name, _changes(instructions, name))
                if name in function.__globals__ or variable.is_assigned:  # The others are of Python: `len`.
                    self._add(used, f"{function.__module__}: {name}", variable)
            for name in sorted(set(code.co_freevars) & set(cells)):
                variable = _of_cell(cells[name], _changes(instructions, name))
                self._add(used, f"{function.__qualname__}: {name}", variable)
        for number, argument in enumerate(arguments):
            self._add(used, f"{function.__qualname__}: argument {number}", _of_argument(argument, codes))
        for label, variable in used.items():
            self._add(self.found, label, variable)
            value = variable.value
            if isinstance(value, _CALLABLES):
                self._waiting.append((value, None, ""))
            if is_holder(value) or (isinstance(value, types.FunctionType) and vars(value) and is_of_script(value)):
                holders[label] = value
            holders.update(_holders_in(label, value))
        self._look_into(holders, codes)

    def _look_into(self, holders: dict[str, Any], codes: list[types.CodeType]) -> None:
        """Adds the attributes of objects that code names, also of objects in them, and follows their methods."""
        names = {name for code in codes for name in code.co_names}
        stored = {one.argval for code in codes for one in dis.get_instructions(code) if one.opname == "STORE_ATTR"}
        waiting = collections.deque(holders.items())
        seen: set[int] = set()
        while waiting:
            label, holder = waiting.popleft()
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            # Those that it stores may be made in training, or be of the class before.
            for name in sorted(stored | (names & set(vars(holder)))):
                for code in codes:
                    changes = _changes(list(dis.get_instructions(code)), name)
                    self._add(self.found, f"{label}.{name}", _of_holder(holder, name, changes))
                value = vars(holder).get(name)
                if isinstance(value, _CALLABLES):
                    self._waiting.append((value, None, ""))
                if is_holder(value):
                    waiting.append((f"{label}.{name}", value))
                waiting.extend(_holders_in(f"{label}.{name}", value).items())
            for kind in (
                () if isinstance(holder, (type, types.ModuleType, types.FunctionType)) else type(holder).__mro__
            ):
                if is_of_user(kind) and is_of_script(kind):
                    self._look_at_class(kind, holder, label, names, codes)

    def _look_at_class(self, kind: type, holder: Any, label: str, names: set[str], codes: list[types.CodeType]) -> None:
        """Follows the methods of an object that code names, and adds the attributes of its class."""
        for name in sorted(names & set(vars(kind)) - set(vars(holder))):
            value = vars(kind)[name]
            methods = [getattr(value, part, None) for part in ("fget", "fset", "__func__")]
            functions = [one for one in (value, *methods) if isinstance(one, types.FunctionType)]
            self._waiting.extend((one, holder, label) for one in functions)
            for code in codes if isinstance(value, CONTAINERS) else ():
                changes = _changes(list(dis.get_instructions(code)), name)
                self._add(self.found, f"{kind.__qualname__}.{name}", _of_holder(kind, name, changes))

    @staticmethod
    def _add(found: dict[str, ScriptVariable], label: str, variable: ScriptVariable) -> None:
        found[label] = variable if label not in found else variable.also(found[label])


def is_holder(value: Any) -> bool:
    """Returns whether a value is a module, a class or an object of the script, whose attributes may be variables."""
    if isinstance(value, types.ModuleType):
        return is_of_script(value)
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)):
        return True
    own = value if isinstance(value, type) else type(value)
    if isinstance(value, (*_OF_KERAS, *_CALLABLES)) or not is_of_user(own) or not hasattr(value, "__dict__"):
        return False
    # What is iterated over is data, whose position a backup knows.
    is_data = isinstance(value, keras.utils.PyDataset) or hasattr(own, "__iter__") or hasattr(own, "__next__")
    return not is_data and is_of_script(own)


def _holders_in(label: str, value: Any) -> dict[str, Any]:
    """Returns the objects of the script that are in a list or dict of the script."""
    if not isinstance(value, (list, tuple, dict)) or len(value) > _MOST_HOLDERS:
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {f"{label}[{key!r}]": one for key, one in items if is_holder(one)}


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
    kinds = (int, float, str, type(None))
    names = [(one, key) for one in classes for key, value in vars(one).items() if isinstance(value, kinds)]
    return {f"{one.__qualname__}.{key}": _of_holder(one, key, (True, False)) for one, key in names if key[:2] != "__"}


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


def _of_global(values: dict[str, Any], name: str, changes: tuple[bool, bool]) -> ScriptVariable:
    return ScriptVariable(lambda: values[name], lambda value: values.__setitem__(name, value), *changes, None)


def _of_cell(cell: types.CellType, changes: tuple[bool, bool]) -> ScriptVariable:
    return ScriptVariable(
        lambda: cell.cell_contents, lambda value: setattr(cell, "cell_contents", value), *changes, None
    )


def _of_holder(holder: Any, name: str, changes: tuple[bool, bool]) -> ScriptVariable:
    place = (id(holder), name)
    return ScriptVariable(lambda: vars(holder)[name], lambda value: setattr(holder, name, value), *changes, place)


def _of_argument(value: Any, codes: list[types.CodeType]) -> ScriptVariable:
    """Returns an argument that a function always has: a container can be changed, and is filled in place."""
    is_changed_inside = any(_changes(list(dis.get_instructions(code)), "")[1] for code in codes)
    return ScriptVariable(lambda: value, lambda other: None, False, is_changed_inside)
