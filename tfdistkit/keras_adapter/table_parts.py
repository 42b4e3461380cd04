"""Saves and loads optimizers: the state of a table that is split into several variables, as that of one.

Keras saves the state of an optimizer as a list, by position. For a split table this saves the list of an unsplit
table, so that it can be loaded into any number of parts, or into one variable.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# By optimizer: the ids of variables that files of weights do not have.
_LEFT_OUT: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class TablePart:
    """The rows of a table that a variable holds.

    Args:
        table: The unique number of the table.
        index: The part, from 0.
        count: The number of parts.
        first: Its first row.
    """

    table: int
    index: int
    count: int
    first: int


def mark(variable: Any, part: TablePart) -> None:
    """Marks a Keras variable as a part of a table."""
    variable.tfdistkit_part = part


def part_of(variable: Any) -> TablePart | None:
    """Returns the part of a table that a Keras variable holds; None for other variables."""
    return getattr(variable, "tfdistkit_part", None)


def slot(original: Any, optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of Keras's `add_variable_from_reference`: marks a slot as one, and with the part of its variable."""
    variable = original(optimizer, reference_variable, *args, **kwargs)
    variable.tfdistkit_is_slot = True
    part = part_of(reference_variable)
    if part is not None:
        mark(variable, part)
    return variable


def save_optimizer(original: Any, optimizer: Any, store: Any) -> None:
    """Hook of the optimizers' `save_own_variables`: saves the parts of a table as one array."""
    groups = _groups(_saved(optimizer))
    if len(groups) == len(optimizer.variables):
        return original(optimizer, store)
    for i, group in enumerate(groups):
        store[str(i)] = joined(group)
    return None


def load_optimizer(original: Any, optimizer: Any, store: Any) -> None:
    """Hook of the optimizers' `load_own_variables`: loads one array into the parts of a table."""
    groups = _groups(_saved(optimizer))
    if len(groups) == len(optimizer.variables):
        return original(optimizer, store)
    if len(groups) != len(store.keys()):
        # As in Keras, a warning. It happens with Adafactor, which has state per column of each part.
        warnings.warn(
            f"Skipping variable loading for optimizer {optimizer.name!r}: it must have the variables of the saved "
            f"optimizer. Received: {len(groups)} variables, saved: {len(store.keys())}.",
            stacklevel=2,
        )
        return None
    for i, group in enumerate(groups):
        assign_rows(group, store[str(i)])
    return None


def leave_out(optimizer: Any, variable: Any) -> None:
    """Leaves a variable out of what is saved of an optimizer: a file of another compression loads, too.

    Args:
        optimizer: A Keras optimizer.
        variable: One of its variables.
    """
    _LEFT_OUT.setdefault(optimizer, set()).add(id(variable))


def _saved(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    left_out = _LEFT_OUT.get(inner, set())
    return [variable for variable in optimizer.variables if id(variable) not in left_out]


def joined(variables: Sequence[Any]) -> np.ndarray:
    """Concatenates the values of variables of consecutive rows into one array.

    Only the array and one part are in memory at a time, instead of all parts.
    """
    first = variables[0].numpy()
    if len(variables) == 1:
        return first
    whole = np.empty((sum(v.shape[0] for v in variables), *first.shape[1:]), first.dtype)
    row = 0
    for variable in variables:
        whole[row : row + variable.shape[0]] = variable.numpy()
        row += variable.shape[0]
    return whole


def assign_rows(variables: Sequence[Any], whole: Any) -> None:
    """Assigns the rows of one array to variables of consecutive rows.

    Raises:
        ValueError: if the array has another shape than the variables together.
    """
    if len(variables) == 1:
        variables[0].assign(whole)
        return
    rows = sum(v.shape[0] for v in variables)
    if tuple(whole.shape) != (rows, *variables[0].shape[1:]):
        expected = (rows, *variables[0].shape[1:])
        raise ValueError(f"The table must have the shape {expected}. Received: {tuple(whole.shape)}.")
    row = 0
    for variable in variables:
        variable.assign(whole[row : row + variable.shape[0]])
        row += variable.shape[0]


def _groups(variables: Sequence[Any]) -> list[list[Any]]:
    """Groups the parts of each table, and keeps the order of the variables.

    An optimizer creates its slots variable by variable, always in the same order. So the n-th slots of all parts
    are one slot of the table, at the position of the first of them.
    """
    groups: list[list[Any]] = []
    by_table: dict[tuple[int, int], list[Any]] = {}
    counts: dict[tuple[int, int], int] = {}
    for variable in variables:
        part = part_of(variable)
        if part is None or part.count == 1:
            groups.append([variable])
            continue
        number = counts.get((part.table, part.index), 0)
        counts[part.table, part.index] = number + 1
        key = part.table, number
        if key not in by_table:
            by_table[key] = []
            groups.append(by_table[key])
        by_table[key].append(variable)
    return groups
