"""Warns of a loss or a metric whose graph shows that it compares the rows of one replica only with each other."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdistkit.errors import explain
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers
from tfdistkit.strategies.sync.aggregates.compared_rows import is_in_layer, layer_names
from tfdistkit.strategies.sync.aggregates.row_axes import contracted, letters
from tfdistkit.strategies.sync.aggregates.row_reader import LAYERS, RowReader, can_read, reader_of

# Operations that compute each number from the numbers at the same place, with broadcasting.
_OF_NUMBERS = frozenset(
    (
        *("Add", "AddV2", "Sub", "Mul", "MulNoNan", "Div", "RealDiv", "DivNoNan", "Pow", "Maximum", "Minimum", "Atan2"),
        *("SquaredDifference", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "FloorMod"),
        *("LogicalAnd", "LogicalOr", "Select", "SelectV2", "Xlogy", "Xdivy"),
    )
)
# Operations that pick some of the rows by their numbers.
_PICKING = ("TopK", "TopKV2", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")
# Operations of layers that may also look up or multiply numbers of all rows: the weights of classes.
_TABLES = frozenset(("GatherV2", "MatMul", "BatchMatMulV2", "Einsum"))
# Results of operations that hold nothing of the numbers in their inputs, or whose inputs are not read.
_ENDS = ("PlaceholderWithDefault", "Shape", "ShapeN", "Size")
# The maximum number of operations behind a loss that are examined.
_MOST = 2000


def warn(step: steps.ReplicaStep, losses: Iterable[Any]) -> None:
    """Warns if a loss compares the rows of a replica with each other: negatives in the batch, deviations from its mean.

    Args:
        step: The step of this replica.
        losses: The losses that a step differentiates.
    """
    _warn(
        step,
        losses,
        "A loss in a step",
        "Compute it in an object of a subclass of `keras.losses.Loss`, which gets the rows of all replicas, or "
        "gather them first: `z = tfdistkit.collectives.all_gather(z)`.",
    )


def require_whole_groups(step: steps.ReplicaStep) -> None:
    """Adds a check to a step that takes every n-th row (`z[0::2]` and `z[1::2]`): each replica must hold whole groups.

    The parts of a batch begin anywhere: of 6 rows on 2 replicas, 3 are on each, and the second pair is on both.

    Args:
        step: The step of this replica.
    """
    if step.is_eager or step.rows is None or step.is_local or step.is_in_inner_graph() or step.graph is None:
        return
    slices = [one for one in step.graph.get_operations() if one.type == "StridedSlice"]
    for every in {_step_of(one) for one in slices if reader_of(step).axis_of_rows(one.inputs[0]) == 0} - {1}:
        _check_groups(step, every)


def _step_of(strided_slice: Any) -> int:
    strides = tf.get_static_value(strided_slice.inputs[3])
    return 1 if strides is None or len(strides) == 0 else abs(int(strides[0]))


def _check_groups(step: steps.ReplicaStep, every: int) -> None:
    text = explain(
        f"A step that takes one of every {every} rows (`z[::{every}]`) must get whole groups of rows on each replica.",
        received="the rows of this replica and of the global batch, below",
        expected=f"a multiple of {every} rows on each of {step.replicas} replicas",
        do=f"Make all batches a multiple of {every * step.replicas}, with `drop_remainder=True`, or keep the rows of a "
        f"group in one element of the dataset: `dataset.batch({every}).batch(size)`.",
    )
    tf.debugging.Assert(tf.equal(tf.math.floormod(step.rows, every), 0), [text, step.rows, step.total_rows])


def warn_of_metric(step: steps.ReplicaStep, number: Any, name: str) -> None:
    """Warns if a number that updates a metric in a `test_step` compares the rows of a replica with each other.

    Args:
        step: The step of this replica. Train steps are compared with one process before the first one.
        number: The number.
        name: The name of the metric.
    """
    if step.in_test_step:
        warn_of_numbers(step, [number], f"A number for the metric {name!r} in `test_step`")


def warn_of_numbers(step: steps.ReplicaStep, numbers: Iterable[Any], what: str) -> None:
    """Warns if a number that a `test_step` or `predict_step` returns compares the rows of a replica with each other.

    Args:
        step: The step of this replica.
        numbers: The numbers.
        what: What they are, for the warning.
    """
    _warn(
        step,
        numbers,
        what,
        "Compute it in `update_state(y, y_pred)` of a metric of your own, which gets the rows of all replicas, or "
        "gather them first: `z = tfdistkit.collectives.all_gather(z)`.",
    )


def _warn(step: steps.ReplicaStep, losses: Iterable[Any], what: str, cure: str) -> None:
    losses = [one for one in losses if can_read(step, one)]
    if step.is_local or not losses:
        return
    exact = set[str]().union(*(global_numbers.computed_again(step, one) for one in losses))
    # Losses that have gathered the rows of all replicas compare the rows of the batch.
    reader = RowReader(step, step.gathered_inputs) if step.gathered_inputs else reader_of(step)
    found = _comparison(reader, losses, layer_names(step.model), exact)
    if found is None or step.replica_id:
        return
    warnings.warn(
        explain(
            f"{what} compares rows ({found}), and sees those of one replica alone: the results of "
            f"{step.replicas} replicas differ from those of one process.",
            received=f"the rows of one of {step.replicas} replicas in each comparison",
            expected="the rows of the whole batch",
            do=cure,
        ),
        stacklevel=3,
    )


def _comparison(reader: RowReader, losses: list[tf.Tensor], layers: set[str], exact: set[str]) -> str | None:
    waiting, seen = list(losses), {one.name for one in losses}
    while waiting and len(seen) < _MOST:
        tensor = waiting.pop()
        operation = tensor.op
        if _makes_pairs(reader, operation):
            return f"each with each other, by {operation.type}"
        if _picks_rows(reader, tensor) and tensor.name not in exact and not is_in_layer(operation, layers):
            what = "the largest of all of them" if operation.type.startswith("TopK") else "how many of them differ"
            return f"{what}, by {operation.type}"
        if reader.is_softmax_of_rows(operation) and not is_in_layer(operation, layers):
            return f"with the sum of all of them, by {operation.type}"
        is_end = operation.type in LAYERS or operation.type in _ENDS
        if is_end and operation.type not in _TABLES:
            continue
        of_rows = [one for one in operation.inputs if reader.comes_from_rows(one)]
        numbers = [one for one in of_rows if one.dtype.is_floating and reader.is_of_all_rows(one)]
        is_compared = bool(numbers) and tensor.name not in exact
        if is_compared and reader.axis_of_rows(tensor) is not None and not is_in_layer(operation, layers):
            return f"with a number of all of them, by {operation.type}"
        if is_end and not _picks_numbers(reader, tensor):
            continue
        waiting += [one for one in of_rows if one.name not in seen]
        seen.update(one.name for one in of_rows)
    return None


def _picks_numbers(reader: RowReader, tensor: tf.Tensor) -> bool:
    """Returns whether an operation picks some of the rows, such as the middle ones of sorted rows: a median."""
    return tensor.op.type == "GatherV2" and reader.axis_of_rows(tensor) is None


def _picks_rows(reader: RowReader, tensor: tf.Tensor) -> bool:
    """Returns whether an operation sorts numbers of the rows, takes the largest (a median), or those that differ."""
    operation = tensor.op
    if operation.type in ("Size", "Shape") and operation.inputs[0].op.type.startswith("Unique"):
        operation = operation.inputs[0].op  # How many rows differ.
    if operation.type not in _PICKING:
        return False
    of = operation.inputs[0]
    axis = reader.axis_of_rows(of)
    return axis is not None and axis + 1 == of.shape.rank


def _makes_pairs(reader: RowReader, operation: Any) -> bool:
    """Returns whether an operation computes a number of each row and each other: a product, a difference."""
    inputs = list(operation.inputs)
    if operation.type in _OF_NUMBERS:
        return reader.makes_pairs(operation)
    if len(inputs) != 2 or not all(reader.comes_from_rows(one) for one in inputs):
        return False
    axes = [reader.axis_of_rows(one) for one in inputs]
    if operation.type == "MatMul":
        return None not in axes and axes == [1 - axis for axis in contracted(operation)]
    if operation.type == "Einsum" and None not in axes:
        (first, second), result = letters(operation, axes)
        return first != second and {first, second} <= set(result)
    return False
