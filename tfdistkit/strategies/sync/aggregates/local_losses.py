"""Warns of a loss whose graph shows that it compares rows of one replica with each other, and with no others."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdistkit.errors import explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import step as steps
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
# Operations behind a loss that are looked at, at most.
_MOST = 2000


def warn(step: steps.ReplicaStep, losses: Iterable[Any]) -> None:
    """Warns if a loss compares the rows of a replica with each other: negatives in the batch, deviations from its mean.

    Args:
        step: The step of this replica.
        losses: The losses that a step differentiates.
    """
    losses = [one for one in losses if can_read(step, one)]
    if step.is_local or step.replica_id or not losses:
        return
    found = _comparison(reader_of(step), losses, _layer_names(step.model))
    if found is None:
        return
    warnings.warn(
        explain(
            f"A loss in a step compares rows ({found}), and sees those of one replica alone: the results of "
            f"{step.replicas} replicas differ from those of one process.",
            received=f"one {step.replicas}th of the batch in each comparison",
            expected="the rows of the whole batch",
            do="Compute it in an object of a subclass of `keras.losses.Loss`, which gets the rows of all replicas, or "
            "gather them first: `z = tfdistkit.collectives.all_gather(z)`.",
        ),
        stacklevel=2,
    )


def _comparison(reader: RowReader, losses: list[tf.Tensor], layers: set[str]) -> str | None:
    waiting, seen = list(losses), {one.name for one in losses}
    while waiting and len(seen) < _MOST:
        tensor = waiting.pop()
        operation = tensor.op
        if _makes_pairs(reader, operation):
            return f"each with each other, by {operation.type}"
        if reader.is_softmax_of_rows(operation) and not _is_in_layer(operation, layers):
            return f"with the sum of all of them, by {operation.type}"
        if operation.type in LAYERS or operation.type == "PlaceholderWithDefault":
            continue
        of_rows = [one for one in operation.inputs if reader.comes_from_rows(one)]
        numbers = [one for one in of_rows if one.dtype.is_floating and reader.is_of_all_rows(one)]
        if numbers and reader.axis_of_rows(tensor) is not None and not _is_in_layer(operation, layers):
            return f"with a number of all of them, by {operation.type}"
        waiting += [one for one in of_rows if one.name not in seen]
        seen.update(one.name for one in of_rows)
    return None


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


def _layer_names(model: Any) -> set[str]:
    return set() if model is None else {layer.name for layer in private_api.layers_of(model) if layer is not model}


def _is_in_layer(operation: Any, layers: set[str]) -> bool:
    """Returns whether a layer made an operation, as BatchNormalization does, by its name."""
    scopes = operation.name.split("/")[:-1]
    return any(scope in layers or scope.rpartition("_")[0] in layers for scope in scopes)
