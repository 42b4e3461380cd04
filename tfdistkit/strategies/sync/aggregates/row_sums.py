"""Finds sums over the rows of a batch in a value that a step writes to the state of a layer, and sums them globally.

The mean of the replicas is right for statistics (moving means), but not for what adds up over rows: a count of tokens,
the codebook of a VQ-VAE. Such a value is affine in its sums over rows, for example
`decay * count + (1 - decay) * ops.sum(one_hot)`: its constant part is the same on all replicas, and its sums add up.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers
from tfdistkit.strategies.sync.aggregates.graph_copies import copied, outside_of_branches
from tfdistkit.strategies.sync.aggregates.row_axes import PRODUCTS, SAME, SCATTERED
from tfdistkit.strategies.sync.aggregates.row_reader import MOST_OPERATIONS, RowReader, can_read, reader_of

# Linear in their first input, if the others are constant.
_LINEAR = frozenset(
    (
        *("Neg", "Reshape", "ExpandDims", "Squeeze", "Transpose", "Tile", "BroadcastTo", "Sum", "Mean", "Pad"),
        *("StridedSlice", "Slice", "GatherV2", "Mul", "Div", "RealDiv", "DivNoNan", "MatMul", "BatchMatMulV2"),
    )
)
_PARTS = ("constant", "mean", "sum", "whole")
_OF_PYTHON = (int, float, bool, np.ndarray, np.generic)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A value as a sum of four parts; None for a part that is zero."""

    # The same on all replicas.
    constant: tf.Tensor | None = None
    # Of the rows of this replica: a mean over them, or anything that is not a sum.
    mean: tf.Tensor | None = None
    # Adds up over rows.
    sum: tf.Tensor | None = None
    # A sum that is already that of the global batch, the same on all replicas.
    whole: tf.Tensor | None = None

    def mapped(self, function: Callable[[tf.Tensor], tf.Tensor]) -> Parts:
        """Applies a linear function to each part."""
        parts = (self.constant, self.mean, self.sum, self.whole)
        return Parts(*(None if part is None else function(part) for part in parts))

    def __add__(self, other: Parts) -> Parts:
        pairs = [(getattr(self, name), getattr(other, name)) for name in _PARTS]
        return Parts(*(b if a is None else a if b is None else a + b for a, b in pairs))


def of_global_batch(step: steps.ReplicaStep, value: Any) -> tf.Tensor | None:
    """Returns the value for the global batch of a value that adds up over rows.

    Args:
        step: The step of this replica, in whose graph the value was computed.
        value: The value, from the rows of this replica.

    Returns:
        The value, the same on all replicas; None if it has no sum over rows, or if its graph cannot be read (in eager
        steps and in branches).
    """
    number = global_numbers.of_global_batch(step, value, of_integers=True)
    if number is not None:
        return number.value
    # A float without a dimension is often a part of a quotient whose other part is averaged (a running mean and its
    # count), and divisions by a static number of rows cannot be seen: both stay means.
    if not can_read(step, value) or (value.dtype.is_floating and (not value.shape.rank or step.held_rows is not None)):
        return None
    parts = _parts(reader_of(step), value)
    if parts.sum is parts.whole or (parts.mean is not None and not value.dtype.is_floating):
        return None
    summed = None if parts.sum is None else step.sum(step.if_any_rows(parts.sum))
    mean = None if parts.mean is None else step.weighted_sum(parts.mean)
    known = [one for one in (parts.constant, parts.whole, summed, mean) if one is not None]
    return functools.reduce(operator.add, known)


def number_of_all(step: steps.ReplicaStep, number: Any) -> Any:
    """Returns a number for the global batch that a step computed from rows: a learning rate, from the loss.

    Args:
        step: The step of this replica.
        number: The number, from the rows of this replica.

    Returns:
        The number, the same on all replicas; the given one if it is not known.
    """
    if step.is_local or step.in_update or not tf.is_symbolic_tensor(number):
        return number
    total = of_branch(step, number)
    if total is None:
        known = global_numbers.of_global_batch(step, number, of_integers=True, of_means=True)
        total = None if known is None else known.value
    return number if total is None else total


def of_branch(step: steps.ReplicaStep, value: Any) -> tf.Tensor | None:
    """Returns what a branch writes to state, for the global batch: computed before the branch, from all rows.

    The branch often reads it again at once, as in an initialization by the first batch: the end of the step is too
    late.

    Args:
        step: The step of this replica.
        value: The value, from the rows of this replica.

    Returns:
        The value, the same on all replicas; None outside of branches that all replicas take, and if it is not known.
    """
    graph = step.graph
    if graph is None or step.in_update or step.is_local or not step.is_in_inner_graph():
        return None
    before = _before_branch(step, value)
    if before is None:
        return None
    with graph.as_default():
        number = global_numbers.of_global_batch(step, before, of_integers=True, of_means=True)
        if number is not None:
            return number.value
        total = of_global_batch(step, before)
        return before if total is None and is_same_on_all(step, before) else total


def _before_branch(step: steps.ReplicaStep, value: Any) -> tf.Tensor | None:
    """Computes a value of a branch before the branch; None if that is not possible, and in eager steps."""
    if not step.in_keras_step or step.own_condition is not None or not tf.is_symbolic_tensor(value):
        return None
    if step.graph is None or value.graph is step.graph:
        return value
    return outside_of_branches(value, step.graph)


def is_of_rows(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether a value is known to come from the rows of this replica.

    Args:
        step: As in `of_global_batch`.
        value: As in `of_global_batch`.
    """
    return can_read(step, value) and reader_of(step).comes_from_batch(value)


def may_be_of_rows(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether a value comes from the rows of this replica, or may, where its graph cannot be read.

    Args:
        step: As in `of_global_batch`.
        value: As in `of_global_batch`; also a number or an array.
    """
    if can_read(step, value) or isinstance(value, _OF_PYTHON):
        return is_of_rows(step, value)
    before = _before_branch(step, value)
    return step.is_eager or before is None or reader_of(step).comes_from_batch(before)


def is_same_on_all(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether a value is known to be the same on all replicas: it comes from no row and no random number.

    Args:
        step: As in `of_global_batch`.
        value: As in `of_global_batch`; also a number or an array.
    """
    if isinstance(value, _OF_PYTHON):
        return True
    return can_read(step, value) and not reader_of(step).may_differ(value)


def holds_rows(step: steps.ReplicaStep, value: Any) -> bool:
    """Returns whether a value holds rows of the batch themselves, and not only something computed over all of them.

    Args:
        step: As in `of_global_batch`.
        value: As in `of_global_batch`.
    """
    return can_read(step, value) and reader_of(step).stores_rows(value)


def own_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what this replica adds to a gather of the user's code: a tensor without its placeholder row."""
    step = steps.current()
    if step is None or not step.in_keras_step or step.is_summing or not step.may_be_empty:
        return tensor
    is_of_rows = reader_of(step).has_rows(tensor) if can_read(step, tensor) else tensor.shape[0] == step.held_rows
    return tensor[: tf.where(tf.greater(step.rows, 0), tf.shape(tensor)[0], 0)] if is_of_rows else tensor


def _parts(reader: RowReader, tensor: tf.Tensor, left: int = MOST_OPERATIONS) -> Parts:
    """Returns the parts of a tensor; follows at most `left` linear operations."""
    if not reader.comes_from_batch(tensor):
        return Parts(constant=tensor)
    operation = tensor.op
    kind, inputs = operation.type, list(operation.inputs)
    if tensor.name in reader.gradients or not left:
        return Parts(mean=tensor)
    if reader.adds_up(operation):
        is_mean = tensor.dtype.is_floating and any(reader.is_divided(one) for one in inputs)
        return Parts(mean=tensor) if is_mean else Parts(sum=tensor)
    if kind in SAME:
        return _parts(reader, inputs[0], left - 1)
    if kind == "Cast" and graphs.keeps_numbers(inputs[0].dtype, tensor.dtype):
        return _parts(reader, inputs[0], left - 1).mapped(lambda part: tf.cast(part, tensor.dtype))
    if kind in SCATTERED:
        return _scattered(reader, tensor, left)
    if kind in ("Pack", "ConcatV2"):
        return _joined(operation, [_parts(reader, one, left - 1) for one in graphs.joined_by(operation)])
    if kind in ("Add", "AddV2", "AddN"):
        return sum((_parts(reader, one, left - 1) for one in inputs), Parts()).mapped(
            lambda part: _as_large(part, tensor)
        )
    if kind == "Sub":
        difference = _parts(reader, inputs[0], left - 1) + _parts(reader, inputs[1], left - 1).mapped(tf.negative)
        return difference.mapped(lambda part: _as_large(part, tensor))
    of_batch = [i for i, one in enumerate(inputs) if reader.comes_from_rows(one)]
    if kind == "Reshape" and tensor.shape.is_fully_defined():
        of_batch = [0]  # The target shape was computed from the size of the batch, but holds no values of its rows.
    if kind in _LINEAR and (of_batch == [0] or (of_batch == [1] and kind in ("Mul", *PRODUCTS))):
        position = of_batch[0]
        return _parts(reader, inputs[position], left - 1).mapped(lambda part: copied(tensor, {position: part}))
    return Parts(mean=tensor)


def _scattered(reader: RowReader, tensor: tf.Tensor, left: int) -> Parts:
    """Returns the parts of the result of an operation that adds to entries of a tensor (`tf.tensor_scatter_nd_sub`)."""
    before, indices, updates = tensor.op.inputs

    def added(part: tf.Tensor) -> tf.Tensor:
        part = tf.broadcast_to(part, tf.shape(updates)) if part.shape != updates.shape else part
        entries = tf.scatter_nd(indices, part, tf.shape(before, indices.dtype))
        return -entries if tensor.op.type == "TensorScatterSub" else entries

    if reader.is_scattered(tensor.op):
        entries = added(updates)
        whole = global_numbers.of_global_batch(reader.step, entries, of_integers=True)  # Of rows compared with counts.
        is_mean = tensor.dtype.is_floating and reader.is_divided(updates)
        own = Parts(mean=entries) if is_mean else Parts(sum=entries)
        own = own if whole is None else Parts(whole=whole.value)
    elif reader.comes_from_batch(indices) or reader.axis_of_rows(before) is not None:
        return Parts(mean=tensor)
    else:
        own = _parts(reader, updates, left - 1).mapped(added)
    return _parts(reader, before, left - 1) + own


def _joined(operation: Any, pieces: list[Parts]) -> Parts:
    def joined(parts: list[tf.Tensor | None]) -> tf.Tensor | None:
        if all(part is None for part in parts):
            return None
        pairs = zip(parts, graphs.joined_by(operation))
        filled = [tf.zeros_like(whole) if part is None else part for part, whole in pairs]
        if operation.type == "Pack":
            return tf.stack(filled, operation.get_attr("axis"))
        return tf.concat(filled, operation.inputs[-1])

    return Parts(*(joined([getattr(one, name) for one in pieces]) for name in _PARTS))


def _as_large(part: tf.Tensor, whole: tf.Tensor) -> tf.Tensor:
    is_known = whole.shape.is_fully_defined() and part.shape == whole.shape
    return part if is_known else tf.broadcast_to(part, tf.shape(whole))
