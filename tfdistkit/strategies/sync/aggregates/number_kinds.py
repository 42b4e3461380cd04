"""Tells how a number was computed from the rows of a replica: linear in means over them, in sums, or otherwise."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync.aggregates.compared_rows import COUNTS, NOT_REPEATED, ComparedRows, ComparisonFinder
from tfdistkit.strategies.sync.aggregates.row_axes import LARGEST_BY_INDEX, PRODUCTS, SAME, SMALLEST_BY_INDEX
from tfdistkit.strategies.sync.aggregates.row_reader import LAYERS, RowReader


class Kind(enum.Enum):
    """The kind of a number.

    - CONSTANT: computed from no row.
    - MEAN: a mean over rows, or linear in such means and constants. The mean of the replicas is exact.
    - SUM: linear in sums over rows, without a constant.
    - COUNT: the number of rows, or of entries of them, times a constant.
    - KEPT: a mean over the rows that their content chose (`tf.boolean_mask`).
    - MAX, MIN: an extreme of rows.
    - COMPARED: a sum, a mean or an extreme of rows that were computed with such numbers.
    - OTHER: another function of such numbers.
    - OPAQUE: computed from rows in a way that is not known: taken for a mean.
    - LOCAL: from rows that were compared with each other, or another function of what is opaque: the mean is taken.
    - UNKNOWN: as LOCAL, with rows, or of an unknown size.
    """

    CONSTANT, MEAN, SUM, COUNT, KEPT, MAX, MIN, COMPARED, OTHER, OPAQUE, LOCAL, UNKNOWN = range(12)


# Linear in one input, if the others are constant.
_LINEAR = frozenset(
    (
        *(*SAME, "Neg", "Reshape", "ExpandDims", "Squeeze", "Transpose", "Tile", "BroadcastTo", "Sum", "Mean"),
        *("StridedSlice", "Slice", "GatherV2", "Mul", "MulNoNan"),
    )
)
_EXTREMES = {
    **dict.fromkeys(("Max", "Any", *LARGEST_BY_INDEX), Kind.MAX),
    **dict.fromkeys(("Min", "All", *SMALLEST_BY_INDEX), Kind.MIN),
}
_QUOTIENTS = frozenset(("Div", "RealDiv", "DivNoNan"))
_SUMS = frozenset(("Add", "AddV2", "AddN", "Sub", "Pack"))
# The maximum number of operations behind a sum that are examined.
_MOST_BEHIND = 300
# The maximum number of numbers behind a number.
_MOST = 50_000


class NumberReader:
    """Reads the numbers of a graph.

    Args:
        reader: The reader of the graph.
        means: The names of results of losses, which are means over rows already.
        counts_rows: Whether the first dimension of each tensor with rows is a multiple of the rows: not of ragged ones.
        layers: The names of layers.
    """

    def __init__(self, reader: RowReader, means: set[str], counts_rows: bool, layers: set[str]):
        self._reader, self._means, self._counts_rows = reader, means, counts_rows
        self._finder = ComparisonFinder(reader, self._is_exact, layers)
        self.numbers_of = self._finder.numbers_of
        self._known: dict[str, Kind] = {}
        # By the name of a number of the kind COMPARED.
        self.compared: dict[str, ComparedRows] = {}

    def has_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor holds rows, along any dimension."""
        return self._reader.axis_of_rows(tensor) is not None

    def are_compared(self, rows: tf.Tensor) -> bool:
        """Returns whether a tensor holds rows that were computed with numbers, as with their mean."""
        return self.has_rows(rows) and self._finder.are_compared(rows)

    def _is_exact(self, number: tf.Tensor) -> bool:
        return self.kind(number) not in (Kind.OPAQUE, Kind.LOCAL, Kind.UNKNOWN)

    def kind(self, tensor: tf.Tensor) -> Kind:
        """Returns the kind of a number."""
        waiting, known = [tensor], self._known
        while waiting:
            one = waiting[-1]
            if one.name in known:
                waiting.pop()
                continue
            leaf = self._leaf(one)
            missing = [] if leaf is not None else [before for before in one.op.inputs if before.name not in known]
            if leaf is not None:
                known[one.name] = leaf
            elif len(known) > _MOST:
                known[one.name] = Kind.UNKNOWN
            elif missing:
                waiting.extend(missing)
            else:
                known[one.name] = self._combined(one, [known[before.name] for before in one.op.inputs])
        return known[tensor.name]

    def _leaf(self, tensor: tf.Tensor) -> Kind | None:
        """Returns the kind of a number that is computed from rows, or from nothing; None for one from numbers."""
        reader, operation = self._reader, tensor.op
        if tensor.name in self._means or tensor.name in reader.gradients:
            return Kind.MEAN
        if not reader.comes_from_rows(tensor):
            return Kind.OPAQUE if reader.is_random(tensor) else Kind.CONSTANT
        if graphs.is_from_dataset(tensor) or reader.has_rows(tensor):
            return Kind.MEAN if tensor.shape.rank == 0 else Kind.UNKNOWN
        found = self.aggregate(tensor)
        if found is not None:
            return self._with_compared(tensor, found)
        has_rows = any(reader.axis_of_rows(one) is not None for one in operation.inputs)
        if has_rows or operation.type in NOT_REPEATED or operation.op_def.is_stateful:
            return Kind.OPAQUE if tensor.shape.is_fully_defined() else Kind.UNKNOWN
        return None

    def _with_compared(self, tensor: tf.Tensor, found: Kind) -> Kind:
        """Returns the kind of a sum or a mean over rows, which may have been computed with other numbers."""
        rows = None if found is Kind.COUNT else self._finder.behind(tensor)
        if rows is not None and (tensor.shape.is_fully_defined() or tensor.op.type in COUNTS):
            self.compared[tensor.name] = rows
            return Kind.COMPARED
        return found if tensor.shape.is_fully_defined() else Kind.UNKNOWN

    def aggregate(self, tensor: tf.Tensor) -> Kind | None:
        """Returns the kind of a sum or a mean over rows; None for another operation."""
        reader, operation = self._reader, tensor.op
        if operation.type == "Reshape" and operation.inputs[0].op.type in PRODUCTS and tensor.shape.is_fully_defined():
            product = operation.inputs[0]  # The sizes are known here alone: `tf.tensordot`.
            return None if product.name in reader.gradients else self.aggregate(product)
        if operation.type in ("TensorScatterMax", "TensorScatterMin"):
            is_alone = not reader.comes_from_rows(operation.inputs[0]) and reader.is_scattered(operation)
            return _EXTREMES[operation.type] if is_alone else None
        if operation.type == "Mean" or operation.type in _EXTREMES:
            if not reader.is_along_rows(operation) or reader.has_own_places(operation):
                return None
            if operation.type != "Mean":
                return _EXTREMES[operation.type]
            # Rows of ragged tensors have different numbers of entries.
            is_kept = not self._counts_rows or graphs.depends_on_data(operation.inputs[0])
            return Kind.KEPT if is_kept else Kind.MEAN
        if not reader.adds_up(operation):
            return None
        if operation.type in ("Size", "StridedSlice"):
            shape = operation if operation.type == "Size" else operation.inputs[0].op
            if self._counts_rows and not graphs.depends_on_data(shape.inputs[0]):
                return Kind.COUNT
        if any(self._combines_rows(one) for one in operation.inputs):
            return Kind.LOCAL
        if operation.type in ("Size", "StridedSlice"):
            return Kind.SUM
        if tensor.dtype.is_floating and any(reader.is_divided(one) for one in operation.inputs):
            return Kind.MEAN
        return Kind.SUM

    def _combines_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether rows were compared with a mean, a sum or an extreme of them, behind the last layer."""
        waiting, seen, reader = [tensor], {tensor.name}, self._reader
        while waiting and len(seen) < _MOST_BEHIND:
            operation = waiting.pop().op
            if operation.type in LAYERS or operation.type == "PlaceholderWithDefault":
                continue
            for one in operation.inputs:
                if one.name in seen or not reader.comes_from_rows(one):
                    continue
                if one.dtype.is_floating and reader.is_of_all_rows(one):
                    return True
                seen.add(one.name)
                waiting.append(one)
        return False

    def _combined(self, tensor: tf.Tensor, behind: list[Kind]) -> Kind:
        behind = [Kind.OTHER if one is Kind.COMPARED else one for one in behind]
        operation, kinds = tensor.op, set(behind) - {Kind.CONSTANT}
        if Kind.UNKNOWN in kinds or not (tensor.shape.is_fully_defined() or _has_computed_size(operation, behind)):
            return Kind.UNKNOWN
        if Kind.LOCAL in kinds:
            return Kind.LOCAL
        kind = next(iter(kinds)) if len(kinds) == 1 else Kind.OTHER
        rule: Callable[[Any, list[Kind], Kind], Kind] | None = None
        if operation.type in _QUOTIENTS:
            rule = self._quotient
        elif operation.type in _SUMS or operation.type == "ConcatV2":
            rule = self._sum
        elif operation.type in _LINEAR or operation.type == "Cast":
            rule = self._product
        found = Kind.OTHER if rule is None else rule(operation, behind, kind)
        if found is Kind.OTHER and Kind.OPAQUE in behind and rule == self._sum:
            return Kind.OPAQUE if kinds <= {Kind.OPAQUE, Kind.MEAN} else found
        return Kind.LOCAL if found is Kind.OTHER and Kind.OPAQUE in behind else found

    def _quotient(self, operation: Any, behind: list[Kind], kind: Kind) -> Kind:
        numerator, divisor = behind
        if divisor is Kind.COUNT and numerator in (Kind.SUM, Kind.COUNT):
            return Kind.MEAN
        return self._product(operation, behind, kind) if divisor is Kind.CONSTANT else Kind.OTHER

    def _sum(self, operation: Any, behind: list[Kind], kind: Kind) -> Kind:
        axis = [behind.pop()] if operation.type == "ConcatV2" else []
        if not set(axis) <= {Kind.CONSTANT}:
            return Kind.OTHER
        if set(behind) <= {Kind.SUM, Kind.COUNT}:
            return Kind.COUNT if set(behind) == {Kind.COUNT} else Kind.SUM
        return Kind.MEAN if set(behind) <= {Kind.MEAN, Kind.CONSTANT} else Kind.OTHER

    def _product(self, operation: Any, behind: list[Kind], kind: Kind) -> Kind:
        if behind.count(Kind.CONSTANT) < len(behind) - 1 or kind in (Kind.KEPT, Kind.MAX, Kind.MIN):
            return Kind.OTHER
        if operation.type == "Cast":
            return kind if graphs.keeps_numbers(operation.inputs[0].dtype, operation.outputs[0].dtype) else Kind.OTHER
        return kind


def _has_computed_size(operation: Any, behind: list[Kind]) -> bool:
    """Returns whether an operation is on numbers of a size that is that of the global batch, too, as counts are."""
    pairs = zip(operation.inputs, behind)
    return any(kind is Kind.OTHER and not one.shape.is_fully_defined() for one, kind in pairs)
