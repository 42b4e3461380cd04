"""Tells whether a loss combines the rows of a batch with each other, by the graph between its inputs and its values.

A loss of each row, and a mean of such losses, is exact on the rows of a replica. A quotient of sums over rows, a
similarity of all pairs of rows, or a sum over rows is not.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import tensorflow as tf

from tfdistkit.strategies.losses.row_rules import keeps_rows_apart
from tfdistkit.strategies.sync.data_dependence import depends_on_data, is_along


class Kind(enum.Enum):
    """What a tensor holds: nothing of the batch, numbers of each row, means over rows, or other mixtures of rows."""

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

# Operations whose second input is the axes along which they combine numbers.
_ALONG_AXES = frozenset(
    (
        *("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin"),
        *("ReverseV2", "Cumsum", "Cumprod", "CumulativeLogsumexp"),
    )
)


def kind_of(values: tf.Tensor, inputs: Iterable[tf.Tensor], means: Iterable[tf.Tensor], rows: int | None) -> Kind:
    """Returns what the values of a loss hold.

    Args:
        values: The values, a tensor of a graph.
        inputs: Tensors of the same graph that hold the numbers of each row.
        means: Tensors of the same graph that are known to be means over rows.
        rows: The static number of rows of the inputs; None if unknown.
    """
    kinds = {**{one.name: Kind.ROWS for one in inputs}, **{one.name: Kind.MEAN for one in means}}
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
        else:
            kinds[tensor.name] = _kind(tensor, [kinds[one.name] for one in behind], rows)
    return kinds[values.name]


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
