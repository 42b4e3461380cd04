"""Reads the graph of a step: which tensors hold rows of the batch, and which operations add them up."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.data_dependence import Ancestry, is_from_dataset

SAME = frozenset(("Identity", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics"))
PRODUCTS = frozenset(("MatMul", "BatchMatMul", "BatchMatMulV2"))
# Operations between a tensor whose first dimension holds rows and one where another does, at most.
_MOST_TURNS = 60
_RESHAPING = ("Cast", "StridedSlice", "Slice", "Reshape", "ExpandDims", "Squeeze", "Transpose")

# Count or add up entries by an index of each row.
_BY_INDEX = frozenset(
    (
        "Bincount",
        "DenseBincount",
        "UnsortedSegmentSum",
        "SegmentSum",
        "SegmentSumV2",
        "ScatterNd",
        "HistogramFixedWidth",
    )
)
_MOVES_ROWS = ("Cumsum", "Cumprod", "CumulativeLogsumexp", "ReverseV2", "Roll", "RandomShuffle")
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "ArgMax", "ArgMin")

# Operations whose result has the rows of an input, where it is as long.
_KEEPS_ROWS = frozenset(
    (
        *SAME,
        *("Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "Pow", "Maximum", "Minimum", "SquaredDifference"),
        *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr"),
        *("Select", "SelectV2", "ZerosLike", "OnesLike", "OneHot", "GatherV2", "ConcatV2", "Pack", "Pad", "Tile"),
        *("Reshape", "ExpandDims", "Squeeze", "StridedSlice", "Slice", "Transpose", "BroadcastTo", "BiasAdd"),
        *("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool"),
        *("FusedBatchNormV3", *_REDUCTIONS),
    )
)


# Operations that layers are made of, behind which rows may be compared as they wish.
LAYERS = frozenset(
    (
        *("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv1D", "Conv2D", "Conv3D"),
        *("DepthwiseConv2dNative", "FusedBatchNorm", "FusedBatchNormV3", "GatherV2", "ResourceGather"),
        *("If", "StatelessIf", "While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall"),
    )
)
# Operations between a sum over rows and the state, at most: behind them a network begins, which may be deep.
MOST_OPERATIONS = 40


def can_read(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether the graph behind a value can be read: not in eager steps, branches and functions."""
    return not step.is_eager and not step.is_in_inner_graph() and tf.is_symbolic_tensor(value)


def reader_of(step: steps.ReplicaStep) -> RowReader:
    """Returns the reader of the graph of a step, which remembers what it has seen."""
    if step.graph_reader is None:
        step.graph_reader = RowReader(step)
    return step.graph_reader


class RowReader:
    """Reads the graph behind a value.

    Args:
        step: The step of this replica.
    """

    def __init__(self, step: steps.ReplicaStep):
        self._rows, self.gradients = step.held_rows, step.gradients
        same = step.same_on_all
        self.comes_from_batch = Ancestry(is_from_dataset, same, graphs.is_collective).includes
        self.comes_from_rows = Ancestry(
            is_from_dataset, same, lambda one: graphs.is_collective(one) or self._is_other_size(one)
        ).includes
        self.is_random = Ancestry(graphs.is_unknown, same).includes
        self.may_differ = Ancestry(lambda one: is_from_dataset(one) or graphs.is_unknown(one), same).includes
        shapes = Ancestry(lambda one: one.op.type in ("Shape", "ShapeN", "Size"), is_end=self._is_other_size)
        # A sum over what was divided by the number of rows is a mean. So is most often a gradient.
        self.is_divided = Ancestry(
            lambda tensor: (
                tensor.name in self.gradients
                or (graphs.is_scalar_cast(tensor) and shapes.includes(tensor.op.inputs[0]))
                or self._is_normalized(tensor.op)
            ),
            is_end=lambda tensor: (
                not (tensor.dtype.is_floating or tensor.dtype.is_complex)
            ),  # Counts are counts, whatever they were chosen by.
        ).includes
        self._with_rows: dict[str, bool] = {}
        self._axes: dict[str, int | None] = {}

    def stores_rows(self, tensor: tf.Tensor, left: int = MOST_OPERATIONS) -> bool:
        """Returns whether a tensor holds rows of the batch, alone or between others."""
        operation = tensor.op
        if tensor.name in self.gradients or not left:
            return False
        if self.has_rows(tensor):
            return True
        if operation.type in ("TensorScatterUpdate", "Select", "SelectV2"):
            return any(self.has_rows(one) for one in operation.inputs)
        passes = operation.type in ("ConcatV2", "Pack", "Add", "AddV2", "Sub", "Mul", *SAME, *_RESHAPING)
        return passes and any(self.stores_rows(one, left - 1) for one in operation.inputs if self.comes_from_batch(one))

    def _is_other_size(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is a size of a tensor with rows, of another dimension than theirs."""
        return graphs.is_other_size(tensor) and self.has_rows(tensor.op.inputs[0].op.inputs[0])

    def adds_up(self, operation: Any) -> bool:
        """Returns whether an operation adds up rows: a sum, a product along them, their number."""
        kind, inputs = operation.type, list(operation.inputs)
        if kind == "Sum":
            axis = self.axis_of_rows(inputs[0])
            return axis is not None and graphs.is_along(operation, axis)
        if kind == "L2Loss":
            return self.axis_of_rows(inputs[0]) is not None
        if kind in _BY_INDEX:
            return any(self.has_rows(one) for one in inputs)
        if kind == "Size":
            return self.has_rows(inputs[0])
        if kind == "StridedSlice":  # `ops.shape(x)[0]`
            return inputs[0].op.type == "Shape" and self.has_rows(inputs[0].op.inputs[0]) and graphs.is_first(operation)
        if kind in PRODUCTS and all(self.comes_from_batch(one) for one in inputs):
            return kind == "MatMul" and self._contracts_rows(operation)
        if kind == "Einsum" and all(self.has_rows(one) or not self.comes_from_batch(one) for one in inputs):
            terms, _, result = operation.get_attr("equation").decode().partition("->")
            first = {term[0] for term, one in zip(terms.split(","), inputs) if term and self.has_rows(one)}
            return len(first) == 1 and not first & set(result)
        return False

    def _is_normalized(self, operation: Any) -> bool:
        """Returns whether numbers are divided by something of several rows, as the weights of a mean."""
        if operation.type in ("Softmax", "LogSoftmax", "Reciprocal", "Inv"):
            divisor = operation.inputs[0]
        elif operation.type in ("RealDiv", "Div", "DivNoNan"):
            divisor = operation.inputs[1]
        else:
            return False
        return self.comes_from_rows(divisor) and not self.has_rows(divisor)

    def _contracts_rows(self, product: Any) -> bool:
        contracted = (0 if product.get_attr("transpose_a") else 1, 1 if product.get_attr("transpose_b") else 0)
        return tuple(map(self.axis_of_rows, product.inputs)) == contracted

    def axis_of_rows(self, tensor: tf.Tensor, left: int = _MOST_TURNS) -> int | None:
        """Returns the dimension that holds the rows of the batch: the first, or another one, as after a transposition.

        Args:
            tensor: The tensor.
            left: How many operations to look behind.
        """
        if tensor.name not in self._axes:
            self._axes[tensor.name] = self._axis_of_rows(tensor, left)
        return self._axes[tensor.name]

    def _axis_of_rows(self, tensor: tf.Tensor, left: int) -> int | None:
        operation, rank = tensor.op, tensor.shape.rank
        if operation.type == "TensorListStack" and rank and rank > 1 and self.comes_from_batch(tensor):
            return 1  # What a loop over time gives.
        if self.has_rows(tensor):
            return 0
        if not left or not rank or not self.comes_from_batch(tensor):
            return None
        source = operation.inputs[0] if operation.inputs else None
        if operation.type in LAYERS or source is None:
            return None
        if operation.type in ("Transpose", "Reshape"):
            axis = self.axis_of_rows(source, left - 1)
            if axis is None:
                return None
            if operation.type == "Reshape":
                return graphs.axis_after_tensordot(operation, axis)
            order = tf.get_static_value(operation.inputs[1])
            return None if order is None else list(order).index(axis)
        if operation.type == "Pack":
            axes = [self.axis_of_rows(one, left - 1) for one in operation.inputs]
            place = operation.get_attr("axis") % rank
            return None if axes[0] is None or len(set(axes)) > 1 else axes[0] + (axes[0] >= place)
        if operation.type in _REDUCTIONS:
            axis = self.axis_of_rows(source, left - 1)
            return None if axis is None or graphs.is_along(operation, axis) else graphs.axis_after(operation, axis)
        alike = [one for one in operation.inputs if one.shape.rank == rank and tensor.shape[0] == one.shape[0]]
        found = [self.axis_of_rows(one, left - 1) for one in alike if one.dtype != tf.resource]
        return next((axis for axis in found if axis is not None), None) if operation.type not in _MOVES_ROWS else None

    def is_of_all_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor that comes from rows has a size of its own, whatever their number is.

        Their number itself, and its multiples, do not count.
        """
        sizes = tensor.shape
        if tensor.op.type == "Cast" and tensor.op.inputs[0].dtype.is_integer:
            return False
        if not sizes.is_fully_defined() or (self._rows and any(size % self._rows == 0 for size in sizes)):
            return False
        return self.axis_of_rows(tensor) is None

    def has_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether the first dimension of a tensor holds the rows of the batch, or some for each of them."""
        waiting = [tensor]  # Not by recursion: networks are deeper than Python's stack.
        while waiting:
            one = waiting[-1]
            asked = [] if one.name in self._with_rows else self._rows_by(one)
            missing = [] if isinstance(asked, bool) else [each for each in asked if each.name not in self._with_rows]
            if one.name in self._with_rows:
                waiting.pop()
            elif isinstance(asked, bool):
                self._with_rows[one.name] = asked
            elif any(self._with_rows.get(each.name) for each in asked) or not missing:
                self._with_rows[one.name] = any(self._with_rows.get(each.name) for each in asked)
            else:
                waiting.append(missing[0])
        return self._with_rows[tensor.name]

    def _rows_by(self, tensor: tf.Tensor) -> bool | list[tf.Tensor]:
        """Returns whether a tensor has rows, or the tensors of which one must have them."""
        if not tensor.shape.rank or not self.comes_from_batch(tensor) or tensor.name in self.gradients:
            return False
        operation, rows = tensor.op, self._rows
        if is_from_dataset(tensor):
            return tensor.shape[0] is None or bool(rows and tensor.shape[0] == rows)
        if operation.type in (*_BY_INDEX, "TensorListStack") or (
            operation.type == "Transpose" and not graphs.keeps_first(operation)
        ):
            return False
        if operation.type in _REDUCTIONS and graphs.is_along(operation, 0):
            return False
        if operation.type == "MatMul" and operation.get_attr("transpose_a"):
            return False
        inputs = list(operation.inputs[:1] if operation.type in PRODUCTS else operation.inputs)
        if tensor.shape[0] is None:
            if operation.type not in _KEEPS_ROWS:
                inputs = [one for one in inputs if one.shape.rank == tensor.shape.rank and self.comes_from_batch(one)]
            return inputs or True
        # As long as the batch, perhaps by chance: a vector of means over 32 rows may have 32 features.
        if not rows or tensor.shape[0] % rows or operation.type in ("Einsum", "FusedBatchNormV3"):
            return False
        if operation.type not in _KEEPS_ROWS:  # One that works on each number has the shape of an input.
            inputs = [one for one in inputs if one.shape == tensor.shape and operation.type not in _MOVES_ROWS]
        return inputs
