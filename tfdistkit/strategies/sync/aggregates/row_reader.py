"""Reads the graph of a step: which tensors hold rows of the batch, and which operations add them up."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates.row_axes import (
    BY_INDEX,
    PRODUCTS,
    SAME,
    SCATTERED,
    RowAxes,
    contracted,
    letters,
)
from tfdistkit.strategies.sync.data_dependence import Ancestry, is_from_dataset

_RESHAPING = ("Cast", "StridedSlice", "Slice", "Reshape", "ExpandDims", "Squeeze", "Transpose")

# Operations of layers. The search for compared rows ends here: a layer compares the rows of its replica only.
LAYERS = frozenset(
    (
        *("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv1D", "Conv2D", "Conv3D"),
        *("DepthwiseConv2dNative", "FusedBatchNorm", "FusedBatchNormV3", "GatherV2", "ResourceGather"),
        *("If", "StatelessIf", "While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall"),
    )
)
# Operations that return the size of a tensor, or are as long as one.
_SIZES = ("Shape", "ShapeN", "Size", "Range", "Fill")
# The maximum number of operations between a sum over rows and the state. A longer chain is a network.
MOST_OPERATIONS = 40


def can_read(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether the graph behind a value can be read: not in eager steps, branches and functions."""
    return not step.is_eager and not step.is_in_inner_graph() and tf.is_symbolic_tensor(value)


def reader_of(step: steps.ReplicaStep) -> RowReader:
    """Returns the reader of the graph of a step, which caches its results."""
    if step.graph_reader is None:
        step.graph_reader = RowReader(step)
    return step.graph_reader


class RowReader:
    """Reads the graph behind a value.

    Args:
        step: The step of this replica.
        gathered: Names of further tensors that count as the same on all replicas.
    """

    def __init__(self, step: steps.ReplicaStep, gathered: Set[str] = frozenset()):
        self.step, self._rows, self.gradients = step, step.held_rows, step.gradients
        same = step.same_on_all | gathered if gathered else step.same_on_all
        self.comes_from_batch = Ancestry(is_from_dataset, same, graphs.is_collective).includes
        self.comes_from_rows = Ancestry(
            is_from_dataset, same, lambda one: graphs.is_collective(one) or self._is_other_size(one)
        ).includes
        self._is_unique = Ancestry(lambda one: one.op.type.startswith("Unique"), same).includes
        self.is_random = Ancestry(graphs.is_unknown, same).includes
        self.may_differ = Ancestry(lambda one: is_from_dataset(one) or graphs.is_unknown(one), same).includes
        shapes = Ancestry(lambda one: one.op.type in ("Shape", "ShapeN", "Size"), is_end=self._is_other_size)
        # A sum of values that were divided by the number of rows is a mean. So is a gradient, usually.
        self.is_divided = Ancestry(
            lambda tensor: (
                tensor.name in self.gradients
                or (graphs.is_scalar_cast(tensor) and shapes.includes(tensor.op.inputs[0]))
                or self._is_normalized(tensor.op)
            ),
            is_end=lambda tensor: (
                not (tensor.dtype.is_floating or tensor.dtype.is_complex)
            ),  # Integers are counts, however they were selected.
        ).includes
        # A number of rows, or an index below it, is as long as the rows of any tensor of this size.
        self._holds_numbers = Ancestry(is_from_dataset, same, lambda one: one.op.type in _SIZES).includes
        self._axes = RowAxes(step.held_rows, self.comes_from_batch, self.gradients)
        self.axis_of_rows = self._axes.of

    def stores_rows(self, tensor: tf.Tensor, left: int = MOST_OPERATIONS) -> bool:
        """Returns whether a tensor holds rows of the batch, perhaps beside other entries."""
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
        """Returns whether a tensor is the size of a dimension without rows, of a tensor with rows."""
        place = graphs.place_of_size(tensor)
        axis = None if place is None else self.axis_of_rows(tensor.op.inputs[0].op.inputs[0])
        return axis is not None and axis != place

    def adds_up(self, operation: Any) -> bool:
        """Returns whether an operation sums over rows: a sum, a matrix product along them, or their number."""
        kind, inputs = operation.type, list(operation.inputs)
        if kind == "Sum":
            return self.is_along_rows(operation)
        if kind in ("L2Loss", "Size"):
            return self.axis_of_rows(inputs[0]) is not None
        if kind in BY_INDEX:
            return any(self.has_rows(one) for one in inputs) and not self.has_own_places(operation)
        if kind in SCATTERED:
            return graphs.is_zero(inputs[0]) and self.is_scattered(operation)
        if kind == "SparseTensorDenseMatMul":
            is_along = bool(operation.get_attr("adjoint_a")) and self.has_rows(inputs[3])
            return is_along and self.axis_of_rows(operation.outputs[0]) is None
        if kind == "StridedSlice":  # `ops.shape(x)[0]`
            place = graphs.place_of_size(operation.outputs[0])
            return place is not None and self.axis_of_rows(inputs[0].op.inputs[0]) == place
        if kind in PRODUCTS:
            return [self.axis_of_rows(one) for one in inputs] == contracted(operation)
        if kind == "Einsum":
            of_rows, result = letters(operation, [self.axis_of_rows(one) for one in inputs])
            found = {letter for letter in of_rows if letter is not None}
            return len(found) == 1 and not found & set(result)
        return False

    def has_own_places(self, operation: Any) -> bool:
        """Returns whether entries are combined by places that mean something else on each replica (`tf.unique`)."""
        return any(self._is_unique(one) for one in operation.inputs)

    def is_scattered(self, operation: Any) -> bool:
        """Returns whether an operation scatters values of the rows into entries of its first input."""
        before, indices, updates = operation.inputs
        return self.axis_of_rows(before) is None and (self.has_rows(indices) or self.has_rows(updates))

    def is_along_rows(self, reduction: Any) -> bool:
        """Returns whether a sum, a mean or an extreme is over the rows, and perhaps over other dimensions, too."""
        has_rows = self.axis_of_rows(reduction.inputs[0]) is not None
        return has_rows and self.axis_of_rows(reduction.outputs[0]) is None

    def _is_normalized(self, operation: Any) -> bool:
        """Returns whether an operation divides by an aggregate of rows, such as the sum of the weights of a mean."""
        if self.is_softmax_of_rows(operation):
            return True
        if operation.type in ("Softmax", "LogSoftmax", "Reciprocal", "Inv"):
            divisor = operation.inputs[0]
        elif operation.type in ("RealDiv", "Div", "DivNoNan"):
            divisor = operation.inputs[1]
        else:
            return False
        return self.comes_from_rows(divisor) and self.axis_of_rows(divisor) is None

    def is_softmax_of_rows(self, operation: Any) -> bool:
        """Returns whether an operation divides numbers of rows by a sum over the rows."""
        axis = self.axis_of_rows(operation.inputs[0]) if operation.type in ("Softmax", "LogSoftmax") else None
        return axis is not None and axis + 1 == operation.inputs[0].shape.rank

    def makes_pairs(self, operation: Any) -> bool:
        """Returns whether an elementwise operation combines rows with rows along another dimension, by broadcasting."""
        of_rows = [one for one in operation.inputs if self._holds_numbers(one)]
        return len(of_rows) > 1 and self._axes.has_pairs(of_rows)

    def is_of_all_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor that was computed from rows has a size that does not depend on their number.

        The number of rows itself, and sizes that are multiples of it, do not count.
        """
        sizes = tensor.shape
        if tensor.op.type == "Cast" and tensor.op.inputs[0].dtype.is_integer:
            return False
        if not sizes.is_fully_defined() or (self._rows and any(size % self._rows == 0 for size in sizes)):
            return False
        return self.axis_of_rows(tensor) is None

    def has_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether the first dimension of a tensor holds the rows of the batch, or some for each of them."""
        return self.axis_of_rows(tensor) == 0
