"""One table in several variables: which rows of it a variable has, and how an optimizer's state for it is saved.

Keras saves the state of an optimizer as a list, by position. For a table in parts it is written as the list that
the table would have in one variable, so that it can be read into any number of parts, or into one.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TablePart:
    """Which rows of a table a variable holds.

    Args:
        table: A number of the table's own.
        index: Which of the table's parts this is, from 0.
        count: How many parts there are.
        first: The number of its first row.
    """

    table: int
    index: int
    count: int
    first: int


def mark(variable: Any, part: TablePart) -> None:
    """Says of a Keras variable that it holds a part of a table."""
    variable.tfdistkit_part = part


def part_of(variable: Any) -> TablePart | None:
    """Returns which part of a table a Keras variable holds; None if it is no such variable."""
    return getattr(variable, "tfdistkit_part", None)


def slot(original: Any, optimizer: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of Keras's `add_variable_from_reference`: a slot has the rows of its variable."""
    variable = original(optimizer, reference_variable, *args, **kwargs)
    part = part_of(reference_variable)
    if part is not None:
        mark(variable, part)
    return variable


def save_optimizer(original: Any, optimizer: Any, store: Any) -> None:
    """Hook of Keras's `save_own_variables` of optimizers."""
    groups = _groups(optimizer.variables)
    if len(groups) == len(optimizer.variables):
        return original(optimizer, store)
    for i, group in enumerate(groups):
        store[str(i)] = joined(group)
    return None


def load_optimizer(original: Any, optimizer: Any, store: Any) -> None:
    """Hook of Keras's `load_own_variables` of optimizers."""
    groups = _groups(optimizer.variables)
    if len(groups) == len(optimizer.variables):
        return original(optimizer, store)
    if len(groups) != len(store.keys()):
        # Keras says so, too, and goes on. Adafactor keeps a part's columns for itself, which are no rows.
        warnings.warn(
            f"Skipping variable loading for optimizer {optimizer.name!r}: its tables lie in other parts than when "
            f"it was saved ({len(groups)} variables, saved: {len(store.keys())}).",
            stacklevel=2,
        )
        return None
    for i, group in enumerate(groups):
        assign_rows(group, store[str(i)])
    return None


def joined(variables: Sequence[Any]) -> np.ndarray:
    """Returns the values of variables of consecutive rows as one array, one variable after the other.

    Only the array and one part are in memory at a time, and not all the parts besides it.
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
    """Gives variables of consecutive rows their rows of one array.

    Raises:
        ValueError: if the array has other rows than the variables together.
    """
    if len(variables) == 1:
        variables[0].assign(whole)
        return
    rows = sum(v.shape[0] for v in variables)
    if tuple(whole.shape) != (rows, *variables[0].shape[1:]):
        expected = (rows, *variables[0].shape[1:])
        raise ValueError(f"A table of the shape {expected} cannot take one of the shape {tuple(whole.shape)}.")
    row = 0
    for variable in variables:
        variable.assign(whole[row : row + variable.shape[0]])
        row += variable.shape[0]


def _groups(variables: Sequence[Any]) -> list[list[Any]]:
    """Returns the variables in their order, those of one table that belong together as one group.

    An optimizer makes its slots for one variable after the other, each time in the same order. So the n-th
    slots of all parts are one slot of the table, and it belongs where the first of them is.
    """
    groups: list[list[Any]] = []
    by_table: dict[tuple[int, int], list[Any]] = {}
    seen: dict[tuple[int, int], int] = {}
    for variable in variables:
        part = part_of(variable)
        if part is None or part.count == 1:
            groups.append([variable])
            continue
        number = seen.get((part.table, part.index), 0)
        seen[part.table, part.index] = number + 1
        key = part.table, number
        if key not in by_table:
            by_table[key] = []
            groups.append(by_table[key])
        by_table[key].append(variable)
    return groups
