"""Finds sums over the rows of a batch in a value that a step writes to the state of a layer, and sums them globally.

The mean of the replicas is right for statistics (moving means), but not for what adds up over rows: a count of tokens,
the codebook of a VQ-VAE. Such a value is affine in its sums over rows, for example
`decay * count + (1 - decay) * ops.sum(one_hot)`: its constant part is the same on all replicas, and its sums add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.data_dependence import Ancestry, is_from_dataset

_SAME = frozenset(("Identity", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics"))
_PRODUCTS = frozenset(("MatMul", "BatchMatMul", "BatchMatMulV2"))
# Linear in their first input, if the others are constant.
_LINEAR = frozenset(
    (
        *("Neg", "Reshape", "ExpandDims", "Squeeze", "Transpose", "Tile", "BroadcastTo", "Sum", "Mean", "Pad"),
        *("StridedSlice", "Slice", "GatherV2", "Mul", "Div", "RealDiv", "DivNoNan", "MatMul", "BatchMatMulV2"),
    )
)
# Operations between a sum over rows and the state, at most: behind them a network begins, which may be deep.
_MOST_OPERATIONS = 40
# Transpositions between a tensor of rows and a sum over them, at most.
_MOST_TURNS = 6
_RESHAPING = ("Cast", "StridedSlice", "Slice", "Reshape", "ExpandDims", "Squeeze", "Transpose")

# Names of arguments in `tf.raw_ops` that differ from those of the operation.
_ARGUMENTS = dict.fromkeys(("reduction_indices", "dim", "squeeze_dims"), "axis")

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
        *_SAME,
        *("Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "Pow", "Maximum", "Minimum", "SquaredDifference"),
        *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr"),
        *("Select", "SelectV2", "ZerosLike", "OnesLike", "OneHot", "GatherV2", "ConcatV2", "Pack", "Pad", "Tile"),
        *("Reshape", "ExpandDims", "Squeeze", "StridedSlice", "Slice", "Transpose", "BroadcastTo", "BiasAdd"),
        *("MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "DepthwiseConv2dNative", "MaxPool", "AvgPool"),
        *("FusedBatchNormV3", *_REDUCTIONS),
    )
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A value as a sum of three parts; None for a part that is zero."""

    # The same on all replicas.
    constant: tf.Tensor | None = None
    # Of the rows of this replica: a mean over them, or anything that is not a sum.
    mean: tf.Tensor | None = None
    # Adds up over rows.
    sum: tf.Tensor | None = None

    def mapped(self, function: Callable[[tf.Tensor], tf.Tensor]) -> Parts:
        """Applies a linear function to each part."""
        parts = (self.constant, self.mean, self.sum)
        return Parts(*(None if part is None else function(part) for part in parts))

    def __add__(self, other: Parts) -> Parts:
        pairs = ((self.constant, other.constant), (self.mean, other.mean), (self.sum, other.sum))
        return Parts(*(b if a is None else a if b is None else a + b for a, b in pairs))


def of_global_batch(step: steps.ReplicaStep, value: Any) -> tf.Tensor | None:
    """Returns what a value that adds up over rows is for the global batch.

    Args:
        step: The step of this replica, in whose graph the value was computed.
        value: The value, from the rows of this replica.

    Returns:
        The value, the same on all replicas; None if it has no sum over rows, or if its graph cannot be read (in eager
        steps and in branches).
    """
    # A float without a dimension is often a part of a quotient whose other part is averaged (a running mean and its
    # count), and divisions by a static number of rows cannot be seen: both stay means.
    if not _can_read(step, value) or (value.dtype.is_floating and (not value.shape.rank or step.held_rows)):
        return None
    parts = _reader_of(step).parts(value)
    if parts.sum is None or (parts.mean is not None and not value.dtype.is_floating):
        return None
    total = step.sum(step.if_any_rows(parts.sum))
    if parts.mean is not None:
        total += step.weighted_sum(parts.mean)
    return total if parts.constant is None else parts.constant + total


def is_of_rows(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether a value is known to come from the rows of this replica.

    Args:
        step: As in `of_global_batch`.
        value: As in `of_global_batch`.
    """
    return _can_read(step, value) and _reader_of(step).comes_from_batch(value)


def is_same_on_all(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether a value is known to be the same on all replicas: it comes from no row and no random number.

    Args:
        step: As in `of_global_batch`.
        value: As in `of_global_batch`; also a number or an array.
    """
    if isinstance(value, (int, float, bool, np.ndarray, np.generic)):
        return True
    return _can_read(step, value) and not _reader_of(step).may_differ(value)


def holds_rows(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether a value holds rows of the batch themselves, and not only something computed over all of them.

    Args:
        step: As in `of_global_batch`.
        value: As in `of_global_batch`.
    """
    return _can_read(step, value) and _reader_of(step).stores_rows(value)


def own_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what this replica adds to a gather of the user's: no row of a tensor that holds its placeholder row."""
    step = steps.current()
    if step is None or not step.in_keras_step or step.is_summing or not step.may_be_empty:
        return tensor
    is_of_rows = _reader_of(step).has_rows(tensor) if _can_read(step, tensor) else tensor.shape[0] == step.held_rows
    return tensor[: tf.where(tf.greater(step.rows, 0), tf.shape(tensor)[0], 0)] if is_of_rows else tensor


def _can_read(step: steps.ReplicaStep, value: Any) -> bool:
    return not step.is_eager and not step.is_in_inner_graph() and tf.is_symbolic_tensor(value)


def _reader_of(step: steps.ReplicaStep) -> _Reader:
    if step.graph_reader is None:
        step.graph_reader = _Reader(step)
    return step.graph_reader


class _Reader:
    """Reads the graph behind a value.

    Args:
        step: The step of this replica.
    """

    def __init__(self, step: steps.ReplicaStep):
        self._rows, self._gradients = step.held_rows, step.gradients
        same = step.same_on_all
        self.comes_from_batch = Ancestry(is_from_dataset, same, graphs.is_collective).includes
        self._comes_from_rows = Ancestry(
            is_from_dataset, same, lambda one: graphs.is_collective(one) or self._is_other_size(one)
        ).includes
        self.may_differ = Ancestry(lambda one: is_from_dataset(one) or graphs.is_unknown(one), same).includes
        shapes = Ancestry(lambda one: one.op.type in ("Shape", "ShapeN", "Size"), is_end=self._is_other_size)
        # A sum over what was divided by the number of rows is a mean. So is most often a gradient.
        self._is_divided = Ancestry(
            lambda tensor: (
                tensor.name in self._gradients
                or (graphs.is_scalar_cast(tensor) and shapes.includes(tensor.op.inputs[0]))
                or self._is_normalized(tensor.op)
            ),
            is_end=lambda tensor: (
                not (tensor.dtype.is_floating or tensor.dtype.is_complex)
            ),  # Counts are counts, whatever they were chosen by.
        ).includes
        self._with_rows: dict[str, bool] = {}

    def parts(self, tensor: tf.Tensor, left: int = _MOST_OPERATIONS) -> Parts:
        """Returns the parts of a tensor, from at most as many linear operations in a row as are left."""
        if not self.comes_from_batch(tensor):
            return Parts(constant=tensor)
        operation = tensor.op
        kind, inputs = operation.type, list(operation.inputs)
        if tensor.name in self._gradients or not left:
            return Parts(mean=tensor)
        if self._adds_up(operation):
            is_mean = tensor.dtype.is_floating and any(self._is_divided(one) for one in inputs)
            return Parts(mean=tensor) if is_mean else Parts(sum=tensor)
        if kind in _SAME:
            return self.parts(inputs[0], left - 1)
        if kind == "Cast" and graphs.keeps_numbers(inputs[0].dtype, tensor.dtype):
            return self.parts(inputs[0], left - 1).mapped(lambda part: tf.cast(part, tensor.dtype))
        if kind == "TensorScatterAdd" and not self.comes_from_batch(inputs[0]) and self.has_rows(inputs[2]):
            added = tensor - inputs[0]
            is_mean = self._is_divided(inputs[2])
            return Parts(inputs[0], added if is_mean else None, None if is_mean else added)
        if kind in ("Pack", "ConcatV2"):
            return self._joined(operation, [self.parts(one, left - 1) for one in graphs.joined_by(operation)])
        if kind in ("Add", "AddV2", "AddN"):
            return sum((self.parts(one, left - 1) for one in inputs), Parts()).mapped(
                lambda part: _as_large(part, tensor)
            )
        if kind == "Sub":
            difference = self.parts(inputs[0], left - 1) + self.parts(inputs[1], left - 1).mapped(tf.negative)
            return difference.mapped(lambda part: _as_large(part, tensor))
        of_batch = [i for i, one in enumerate(inputs) if self._comes_from_rows(one)]
        if kind == "Reshape" and tensor.shape.is_fully_defined():
            of_batch = [0]  # A size that was computed from that of the batch, and is none of its rows.
        if kind in _LINEAR and (of_batch == [0] or (of_batch == [1] and kind in ("Mul", *_PRODUCTS))):
            position = of_batch[0]
            return self.parts(inputs[position], left - 1).mapped(lambda part: _again(operation, part, position))
        return Parts(mean=tensor)

    def _joined(self, operation: Any, pieces: list[Parts]) -> Parts:
        def joined(parts: list[tf.Tensor | None]) -> tf.Tensor | None:
            if all(part is None for part in parts):
                return None
            pairs = zip(parts, graphs.joined_by(operation))
            filled = [tf.zeros_like(whole) if part is None else part for part, whole in pairs]
            if operation.type == "Pack":
                return tf.stack(filled, operation.get_attr("axis"))
            return tf.concat(filled, operation.inputs[-1])

        return Parts(*(joined([getattr(one, name) for one in pieces]) for name in ("constant", "mean", "sum")))

    def stores_rows(self, tensor: tf.Tensor, left: int = _MOST_OPERATIONS) -> bool:
        """Returns whether a tensor holds rows of the batch, alone or between others."""
        operation = tensor.op
        if tensor.name in self._gradients or not left:
            return False
        if self.has_rows(tensor):
            return True
        if operation.type in ("TensorScatterUpdate", "Select", "SelectV2"):
            return any(self.has_rows(one) for one in operation.inputs)
        passes = operation.type in ("ConcatV2", "Pack", "Add", "AddV2", "Sub", "Mul", *_SAME, *_RESHAPING)
        return passes and any(self.stores_rows(one, left - 1) for one in operation.inputs if self.comes_from_batch(one))

    def _is_other_size(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is a size of a tensor with rows, of another dimension than theirs."""
        return graphs.is_other_size(tensor) and self.has_rows(tensor.op.inputs[0].op.inputs[0])

    def _adds_up(self, operation: Any) -> bool:
        """Returns whether an operation adds up rows."""
        kind, inputs = operation.type, list(operation.inputs)
        if kind == "Sum":
            axis = self._axis_of_rows(inputs[0])
            return axis is not None and graphs.is_along(operation, axis)
        if kind in _BY_INDEX:
            return any(self.has_rows(one) for one in inputs)
        if kind == "Size":
            return self.has_rows(inputs[0])
        if kind == "StridedSlice":  # `ops.shape(x)[0]`
            return inputs[0].op.type == "Shape" and self.has_rows(inputs[0].op.inputs[0]) and graphs.is_first(operation)
        if kind in _PRODUCTS and all(self.comes_from_batch(one) for one in inputs):
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
        return self._comes_from_rows(divisor) and not self.has_rows(divisor)

    def _contracts_rows(self, product: Any) -> bool:
        contracted = (0 if product.get_attr("transpose_a") else 1, 1 if product.get_attr("transpose_b") else 0)
        return tuple(map(self._axis_of_rows, product.inputs)) == contracted

    def _axis_of_rows(self, tensor: tf.Tensor, left: int = _MOST_TURNS) -> int | None:
        """Returns the dimension that holds the rows of the batch: the first, or another one after a transposition."""
        operation = tensor.op
        if self.has_rows(tensor):
            return 0
        if not left or not tensor.shape.rank or operation.type not in (*_SAME, "Cast", "Transpose", "Reshape"):
            return None
        axis = self._axis_of_rows(operation.inputs[0], left - 1)
        if axis is None or operation.type not in ("Transpose", "Reshape"):
            return axis
        if operation.type == "Reshape":
            return axis if graphs.is_of_tensordot(operation) else None
        order = tf.get_static_value(operation.inputs[1])
        return None if order is None else list(order).index(axis)

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
        if not tensor.shape.rank or not self.comes_from_batch(tensor) or tensor.name in self._gradients:
            return False
        operation, rows = tensor.op, self._rows
        if is_from_dataset(tensor):
            return tensor.shape[0] is None or bool(rows and tensor.shape[0] == rows)
        if operation.type in _BY_INDEX or (operation.type == "Transpose" and not graphs.keeps_first(operation)):
            return False
        if operation.type in _REDUCTIONS and graphs.is_along(operation, 0):
            return False
        if operation.type == "MatMul" and operation.get_attr("transpose_a"):
            return False
        inputs = list(operation.inputs[:1] if operation.type in _PRODUCTS else operation.inputs)
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


def _as_large(part: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    is_known = whole.shape.is_fully_defined() and part.shape == whole.shape
    return part if is_known else tf.broadcast_to(part, tf.shape(whole))


def _again(operation: Any, part: tf.Tensor, position: int) -> tf.Tensor:
    """Applies an operation to another tensor at one of its inputs."""
    definition = operation.op_def
    inputs = list(operation.inputs)
    inputs[position] = part
    given: dict[str, Any] = dict(zip((argument.name for argument in definition.input_arg), inputs))
    # Types follow from the inputs.
    given |= {one.name: operation.get_attr(one.name) for one in definition.attr if one.type != "type"}
    return getattr(tf.raw_ops, operation.type)(**{_ARGUMENTS.get(name, name): value for name, value in given.items()})
