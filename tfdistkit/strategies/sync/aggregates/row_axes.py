"""Tells which dimension of each tensor of a graph holds the rows of the batch: most often the first, not in loops.

Operations that move dimensions are followed from their inputs. Of others, the result has the rows of an input of the
same form. In a Keras step the number of rows is hidden, so the only dimension of an unknown size is that of the rows,
where an operation cannot be followed: a loop, a reshaping to a computed size.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync.data_dependence import is_from_dataset

SAME = frozenset(("Identity", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics"))
PRODUCTS = frozenset(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"))
LOOPS = frozenset(("While", "StatelessWhile"))

# Count or add up entries by an index of each row.
BY_INDEX = frozenset(
    (
        "Bincount",
        "DenseBincount",
        "UnsortedSegmentSum",
        "SegmentSum",
        "SegmentSumV2",
        "SparseSegmentSum",
        "SparseSegmentSumWithNumSegments",
        "ScatterNd",
        "HistogramFixedWidth",
    )
)
# The largest or the smallest entry by an index of each row.
LARGEST_BY_INDEX = ("UnsortedSegmentMax", "SegmentMax", "SegmentMaxV2", "TensorScatterMax")
SMALLEST_BY_INDEX = ("UnsortedSegmentMin", "SegmentMin", "SegmentMinV2", "TensorScatterMin")
# Add to entries of their first input by an index of each row.
SCATTERED = ("TensorScatterAdd", "TensorScatterSub")
MOVES_ROWS = ("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll", "RandomShuffle")
REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin")

# Operations whose result has the rows of an input, where it is as long.
_KEEPS_ROWS = frozenset(
    (
        *SAME,
        *("Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "Pow", "Maximum", "Minimum", "SquaredDifference"),
        *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr"),
        *("Select", "SelectV2", "ZerosLike", "OnesLike", "OneHot", "GatherV2", "ConcatV2", "Pack", "Pad", "Tile"),
        *("Reshape", "ExpandDims", "Squeeze", "StridedSlice", "Slice", "Transpose", "BroadcastTo", "BiasAdd"),
        *("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool"),
        *("FusedBatchNormV3", *REDUCTIONS),
    )
)
# Operations in which rows may meet, so that no dimension but the first is taken for theirs.
_OF_LAYERS = frozenset(
    (
        *("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "FusedBatchNorm", "FusedBatchNormV3"),
        *("ResourceGather", "If", "StatelessIf", "PartitionedCall", "StatefulPartitionedCall"),
    )
)
_WITHOUT_ROWS = BY_INDEX.union(LARGEST_BY_INDEX, SMALLEST_BY_INDEX)


class RowAxes:
    """Finds the dimension of the rows of the tensors of a graph; looks at each once.

    Args:
        rows: The static number of rows; None if it is unknown.
        comes_from_batch: Returns whether a tensor was computed from the batch.
        gradients: The names of gradients, which hold no rows.
    """

    def __init__(self, rows: int | None, comes_from_batch: Callable[[tf.Tensor], bool], gradients: Collection[str]):
        self._rows, self._comes_from_batch, self._gradients = rows, comes_from_batch, gradients
        self._known: dict[str, int | None] = {}

    def of(self, tensor: tf.Tensor) -> int | None:
        """Returns the dimension that holds the rows of the batch, or some for each of them; None if none does."""
        waiting = [tensor]  # Not by recursion: networks are deeper than Python's stack.
        while waiting:
            one = waiting[-1]
            if one.name in self._known:
                waiting.pop()
                continue
            inputs = self._asked(one)
            missing = [before for before in inputs if before.name not in self._known]
            if missing:
                waiting.extend(missing)
            else:
                self._known[one.name] = self._found(one) if inputs or self._may_have_rows(one) else None
        return self._known[tensor.name]

    def has_pairs(self, inputs: Collection[tf.Tensor]) -> bool:
        """Returns whether broadcasting puts the rows of some tensors along different dimensions."""
        known = [(self.of(one), one.shape.rank) for one in inputs]
        return len({axis - rank for axis, rank in known if axis is not None}) > 1

    def _may_have_rows(self, tensor: tf.Tensor) -> bool:
        return bool(tensor.shape.rank) and self._comes_from_batch(tensor) and tensor.name not in self._gradients

    def _asked(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors whose rows tell those of a tensor."""
        if not self._may_have_rows(tensor) or is_from_dataset(tensor):
            return []
        if tensor.op.type == "TensorListStack":
            counted = _counted_by(tensor)
            return [] if counted is None else [counted]
        return [one for one in tensor.op.inputs if one.dtype not in (tf.resource, tf.variant)]

    def _found(self, tensor: tf.Tensor) -> int | None:
        operation = tensor.op
        if is_from_dataset(tensor):
            return 0 if tensor.shape[0] is None or (self._rows and tensor.shape[0] == self._rows) else None
        if operation.type in _WITHOUT_ROWS:
            return None
        if operation.type in SCATTERED:  # As long as its first input, whatever is added.
            return self._known.get(operation.inputs[0].name)
        if operation.type == "TensorListStack":
            return self._stacked(tensor)
        axes = [self._known.get(one.name) for one in operation.inputs]
        rule = _RULES.get(operation.type)
        if rule is not None and any(axis is not None for axis in axes):
            return rule(tensor, axes)
        if operation.type in LOOPS and axes[tensor.value_index] is not None:
            return axes[tensor.value_index]
        if self._has_first(tensor, axes):
            return 0
        return self._other(tensor, axes)

    def _stacked(self, tensor: tf.Tensor) -> int | None:
        """Returns where the rows of a stack are: a loop over time has them in each part, `tf.map_fn` in a part each."""
        counted = _counted_by(tensor)
        if counted is not None and self._known[counted.name] == 0:
            return 0
        found = unknown_size(tensor)
        return found if found is not None or tensor.shape.rank == 1 else 1

    def _has_first(self, tensor: tf.Tensor, axes: list[int | None]) -> bool:
        """Returns whether the first dimension holds rows, where an input has them there, too."""
        operation, rows = tensor.op, self._rows
        pairs = list(zip(operation.inputs, axes))
        if tensor.shape[0] is None:
            if operation.type not in _KEEPS_ROWS:
                pairs = [
                    (one, axis)
                    for one, axis in pairs
                    if one.shape.rank == tensor.shape.rank and self._comes_from_batch(one)
                ]
                if not pairs:
                    return True
            return any(axis == 0 for _, axis in pairs)
        # As long as the batch, perhaps by chance: a vector of means over 32 rows may have 32 features.
        if not rows or tensor.shape[0] % rows or operation.type in ("Einsum", "FusedBatchNormV3"):
            return False
        if operation.type not in _KEEPS_ROWS:  # One that works on each number has the shape of an input.
            pairs = [(a, b) for a, b in pairs if a.shape == tensor.shape and operation.type not in MOVES_ROWS]
        return any(axis == 0 for _, axis in pairs)

    def _other(self, tensor: tf.Tensor, axes: list[int | None]) -> int | None:
        """Returns which later dimension holds rows: that of an input of the same form, or the only unknown one."""
        kind, rank = tensor.op.type, tensor.shape.rank
        if kind in _OF_LAYERS or kind in MOVES_ROWS:
            return None
        if kind in LOOPS or kind == "Fill":
            return unknown_size(tensor)
        pairs = [(one, axis) for one, axis in zip(tensor.op.inputs, axes) if axis is not None]
        # Broadcasting adds dimensions in front.
        places = [(one, axis, axis + rank - one.shape.rank) for one, axis in pairs if one.shape.rank <= rank]
        found = [place for one, axis, place in places if one.shape[axis] == tensor.shape[place]]
        return found[0] if found else None


def unknown_size(tensor: tf.Tensor) -> int | None:
    """Returns the only dimension of a tensor whose size is unknown while tracing; None for none, or for several."""
    unknown = [i for i, size in enumerate(tensor.shape) if size is None]
    return unknown[0] if len(unknown) == 1 else None


def contracted(operation: Any) -> list[int]:
    """Returns the dimensions of the two inputs of a matrix product that it adds up along."""
    names = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    first, second = (bool(operation.get_attr(name)) for name in names)
    ranks = [one.shape.rank or 2 for one in operation.inputs]
    return [ranks[0] - (2 if first else 1), ranks[1] - (1 if second else 2)]


def letters(operation: Any, axes: list[int | None]) -> tuple[list[str | None], str]:
    """Returns the letters of the rows in each term of an Einsum, and the term of its result.

    Args:
        operation: The operation.
        axes: The dimension of the rows of each input.
    """
    terms, _, result = operation.get_attr("equation").decode().replace(" ", "").partition("->")
    spelled = [_without_dots(term, one.shape.rank) for term, one in zip(terms.split(","), operation.inputs)]
    whole = _without_dots(result, operation.outputs[0].shape.rank)
    return [None if axis is None else term[axis] for term, axis in zip(spelled, axes)], whole


def _without_dots(term: str, rank: int | None) -> str:
    """Returns a term of an Einsum with digits for its ellipsis, the same for the same places before the last."""
    missing = (rank or 0) - len(term.replace("...", ""))
    return term.replace("...", string.digits[:missing][::-1])


def _counted_by(stack: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor whose first dimension tells how many parts a loop stacks; None if it is a constant."""
    loop = stack.op.inputs[0].op
    if loop.type not in LOOPS:
        return None
    made = loop.inputs[stack.op.inputs[0].value_index].op
    size = made.inputs[1].op if made.type == "TensorListReserve" else None
    if size is None or size.type != "StridedSlice" or size.inputs[0].op.type != "Shape" or not graphs.is_first(size):
        return None
    return size.inputs[0].op.inputs[0]


def _transposed(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    order = tf.get_static_value(tensor.op.inputs[1])
    if order is None or axes[0] is None:
        return unknown_size(tensor) if axes[0] is not None else None
    return [int(one) % len(order) for one in order].index(axes[0])


def _reduced(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    axis = axes[0]
    if axis is None:
        return None
    if tf.get_static_value(tensor.op.inputs[1]) is None:  # As in `tf.vectorized_map`.
        return unknown_size(tensor)
    return None if graphs.is_along(tensor.op, axis) else graphs.axis_after(tensor.op, axis)


def _product(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    rank = tensor.shape.rank or 2
    places = []
    for one, axis, along, last in zip(tensor.op.inputs, axes, contracted(tensor.op), (2, 1)):
        own = one.shape.rank or 2
        if axis is not None and axis != along:
            places.append(axis + rank - own if axis < own - 2 else rank - last)
    return places[0] if places else None


def _einsum(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    of_rows, result = letters(tensor.op, axes)
    return next((result.index(letter) for letter in of_rows if letter is not None and letter in result), None)


def _sliced(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    operation, axis = tensor.op, axes[0]
    given, rank = operation.inputs[1].shape.num_elements(), operation.inputs[0].shape.rank
    if axis is None or given is None:
        return None
    masks = {name: operation.get_attr(f"{name}_mask") for name in ("ellipsis", "new_axis", "shrink_axis")}
    kept: list[int] = []
    place, left = 0, rank - (given - masks["ellipsis"].bit_count() - masks["new_axis"].bit_count())
    for bit in (1 << i for i in range(given)):
        if masks["ellipsis"] & bit:
            kept += range(place, place + left)
            place += left
        elif masks["new_axis"] & bit:
            kept.append(-1)
        else:
            kept += [] if masks["shrink_axis"] & bit else [place]
            place += 1
    kept += range(place, rank)
    found = kept.index(axis) if axis in kept else None
    same = found is not None and tensor.shape[found] == operation.inputs[0].shape[axis]
    return found if same else None


def _reshaped(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    if axes[0] is None:
        return None
    split = graphs.place_after_tensordot(tensor.op, axes[0])
    if split is not None:
        return split
    found = unknown_size(tensor)
    if found is not None:
        return found
    before, after = tensor.op.inputs[0].shape, tensor.shape
    if after[0] is None:
        return 0 if axes[0] == 0 else None
    is_as_long = before[0] is not None and axes[0] == 0 and after[0] % before[0] == 0
    return 0 if is_as_long else None


def _stacked(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    found, place = {axis for axis in axes if axis is not None}, tensor.op.get_attr("axis") % (tensor.shape.rank or 1)
    axis = found.pop()
    return None if found else axis + (axis >= place)


def _unstacked(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    axis, rank = axes[0], tensor.op.inputs[0].shape.rank
    place = tensor.op.get_attr("axis") % (rank or 1)
    return None if axis is None or axis == place else axis - (axis > place)


def _expanded(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    place = tf.get_static_value(tensor.op.inputs[1])
    if place is None or axes[0] is None:
        return unknown_size(tensor) if axes[0] is not None else None
    return axes[0] + (axes[0] >= int(np.ravel(place)[0]) % (tensor.shape.rank or 1))


def _squeezed(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    axis, sizes = axes[0], tensor.op.inputs[0].shape
    if axis is None:
        return None
    given = [place % sizes.rank for place in tensor.op.get_attr("squeeze_dims")]
    gone = given or [i for i, size in enumerate(sizes) if size == 1]
    return None if axis in gone else axis - sum(place < axis for place in gone)


def _gathered(tensor: tf.Tensor, axes: list[int | None]) -> int | None:
    operation, sizes = tensor.op, tensor.shape
    params, indices = operation.inputs[0].shape.rank, operation.inputs[1].shape.rank
    place, first = tf.get_static_value(operation.inputs[2]), operation.get_attr("batch_dims")
    if place is None or params is None or indices is None:
        return 0 if sizes[0] is None and 0 in axes[:2] else unknown_size(tensor)
    place = int(place) % params
    if axes[1] is not None:
        return axes[1] + (place - first if axes[1] >= first else 0)
    if axes[0] is None or axes[0] < place:
        return axes[0]
    if axes[0] > place:
        return axes[0] - 1 + indices - first
    return place if indices - first == 1 and sizes[place] is None else None


_RULES: dict[str, Callable[[tf.Tensor, list[int | None]], int | None]] = {
    **dict.fromkeys(("Transpose", "ConjugateTranspose"), _transposed),
    **dict.fromkeys(REDUCTIONS, _reduced),
    **dict.fromkeys(PRODUCTS, _product),
    "Einsum": _einsum,
    "StridedSlice": _sliced,
    "Reshape": _reshaped,
    "Pack": _stacked,
    "Unpack": _unstacked,
    "ExpandDims": _expanded,
    "Squeeze": _squeezed,
    "GatherV2": _gathered,
}
