"""Tells whether a loss combines the rows of a batch with each other, by the graph between its inputs and its values.

A loss of each row, and a mean of such losses, is exact on the rows of a replica. A quotient of sums over rows, a
similarity of all pairs of rows, or a sum over rows is not.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.strategies.losses.row_rules import keeps_rows_apart
from tfdistkit.strategies.sync.data_dependence import (
    Ancestry,
    depends_on_data,
    is_along,
    is_later_part,
    is_later_size,
    is_sized_by_data,
)


class Kind(enum.Enum):
    """The content of a tensor: constants, numbers of each row, means over rows, or other mixtures of rows."""

    CONSTANT, ROWS, MEAN, MIXED = range(4)


# Operations on the shape of a tensor, whose result does not depend on its numbers.
_SHAPES = frozenset(("Shape", "ShapeN", "Size", "Rank"))

# Operations that compute a mean over rows from other means over rows, and from constants.
_LINEAR = frozenset(
    (
        *("Add", "AddV2", "AddN", "Sub", "Neg", "Sum", "Mean", "Cast", "Identity", "StopGradient", "Pack", "ConcatV2"),
        *("Reshape", "Squeeze", "ExpandDims", "StridedSlice", "Slice"),
    )
)
_QUOTIENTS = frozenset(("Div", "RealDiv", "DivNoNan"))

# Operations whose result has the rows that their second input names.
_PICKS_ROWS = frozenset(("GatherV2", "GatherNd"))

# Operations whose second input is the axes along which they combine numbers.
_ALONG_AXES = frozenset(
    (
        *("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin"),
        *("ReverseV2", "Cumsum", "Cumprod", "CumulativeLogsumexp"),
    )
)


def kind_of(values: tf.Tensor, inputs: Iterable[tf.Tensor], means: Iterable[tf.Tensor], rows: int | None) -> Kind:
    """Returns the kind of the values of a loss.

    Args:
        values: The values, a tensor of a graph.
        inputs: Tensors of the same graph that hold the numbers of each row.
        means: Tensors of the same graph that are known to be means over rows.
        rows: The static number of rows of the inputs; None if unknown.
    """
    inputs = list(inputs)
    kinds = {**{one.name: Kind.ROWS for one in inputs}, **{one.name: Kind.MEAN for one in means}}
    # By tensor: the operations that chose its rows by their content (`tf.boolean_mask`).
    choices: dict[str, frozenset[str]] = dict.fromkeys(kinds, frozenset())
    counts_rows = _counts_rows(inputs, rows)
    waiting = [values]
    while waiting:
        tensor = waiting[-1]
        if tensor.name in kinds:
            waiting.pop()
            continue
        behind = [] if tensor.op.type in _SHAPES else list(tensor.op.inputs)
        missing = [one for one in behind if one.name not in kinds]
        if missing:
            waiting.extend(missing)
            continue
        found = _kind(tensor, [kinds[one.name] for one in behind], rows)
        chosen = [choices[one.name] for one in behind if kinds[one.name] is Kind.ROWS]
        choices[tensor.name] = _choice(tensor, chosen)
        is_counted = counts_rows(tensor, found is Kind.CONSTANT)
        if is_counted or (found is Kind.ROWS and not _are_of_same_choice(tensor, chosen)):
            found = Kind.MIXED
        kinds[tensor.name] = found
    return kinds[values.name]


def _choice(tensor: tf.Tensor, chosen: list[frozenset[str]]) -> frozenset[str]:
    if is_sized_by_data(tensor.op):
        mask = tensor.op.inputs[0]
        while mask.op.type in ("Reshape", "Identity"):
            mask = mask.op.inputs[0]
        return frozenset((mask.name,))
    if tensor.op.type in _PICKS_ROWS and len(chosen) > 1:
        return chosen[1]
    return frozenset().union(*chosen)


def _are_of_same_choice(tensor: tf.Tensor, chosen: list[frozenset[str]]) -> bool:
    """Returns whether all inputs hold the same rows; the rows that two different masks keep are not the same."""
    return tensor.op.type in _PICKS_ROWS or len(set(chosen)) <= 1


def _counts_rows(inputs: list[tf.Tensor], rows: int | None) -> Callable[[tf.Tensor, bool], bool]:
    """Returns a function: whether a loss is computed with the number of rows, which are all rows in one process.

    If the number of rows is static, it looks like any constant; a constant of the same value costs a needless gather.
    """
    sizes = [] if rows in (None, 1) else [rows, *[one.shape.num_elements() for one in inputs]]
    dynamic = Ancestry(lambda one: one.op.type in ("Shape", "ShapeN", "Size"), is_end=is_later_size)
    static = Ancestry(lambda one: one.op.type == "Const" and _first(one) in sizes, is_end=is_later_part)

    def counts_rows(tensor: tf.Tensor, is_constant: bool) -> bool:
        if is_constant:
            return tensor.op.type == "Cast" and tensor.dtype.is_floating and dynamic.includes(tensor.op.inputs[0])
        is_product = bool(sizes) and tensor.op.type in ("Mul", *_QUOTIENTS)
        return is_product and any(one.shape.rank == 0 and static.includes(one) for one in tensor.op.inputs)

    return counts_rows


def _first(constant: tf.Tensor) -> Any:
    values = np.ravel(tf.get_static_value(constant))
    return values[0].item() if values.size else None


def _kind(tensor: tf.Tensor, behind: list[Kind], rows: int | None) -> Kind:
    if all(one is Kind.CONSTANT for one in behind):
        return Kind.CONSTANT
    if Kind.MIXED in behind:
        return Kind.MIXED
    if Kind.MEAN in behind:
        return Kind.MEAN if _is_linear(tensor.op.type, behind) else Kind.MIXED
    if tensor.op.type in _ALONG_AXES and is_along(tensor.op, 0):
        return Kind.MEAN if tensor.op.type == "Mean" and not depends_on_data(tensor.op.inputs[0]) else Kind.MIXED
    return Kind.ROWS if _keeps_rows(tensor, behind, rows) else Kind.MIXED


def _is_linear(operation: str, behind: list[Kind]) -> bool:
    if Kind.ROWS in behind:
        return False
    if operation in _QUOTIENTS:
        return behind[1] is Kind.CONSTANT
    return operation in _LINEAR or (operation in ("Mul", "MulNoNan") and behind.count(Kind.MEAN) == 1)


def _keeps_rows(tensor: tf.Tensor, behind: list[Kind], rows: int | None) -> bool:
    """Returns whether each entry of the first dimension was computed from one row of the batch."""
    if not tensor.shape.rank or not _may_hold_rows(tensor, rows):
        return False
    return keeps_rows_apart(tensor, [one is Kind.ROWS for one in behind])


def _may_hold_rows(tensor: tf.Tensor, rows: int | None) -> bool:
    first = tensor.shape[0]
    return first is None if rows is None else first is None or first % rows == 0
