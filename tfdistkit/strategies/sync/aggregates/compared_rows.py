"""Finds rows that were computed with aggregates of all rows: deviations from a mean, class weights by counts.

A sum of such rows is that of the global batch if the rows are computed again with the numbers of the global batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync.aggregates.row_reader import LAYERS, RowReader

# Operations that cannot be repeated with other inputs, mostly those with a custom gradient.
NOT_REPEATED = frozenset(("IdentityN", "Placeholder", "PlaceholderWithDefault", "If", "StatelessIf", "While"))
# Operations whose output size depends on all rows: it is the largest class, plus one.
COUNTS = ("Bincount", "DenseBincount")
# The maximum number of tensors behind a sum that are examined.
_MOST_BEHIND = 300


@dataclasses.dataclass(frozen=True)
class ComparedRows:
    """The tensors to compute again for a sum, a mean or an extreme over rows.

    Args:
        rows: Rows that were computed with numbers (aggregates of all rows), in topological order.
        numbers: These numbers.
    """

    rows: list[tf.Tensor]
    numbers: list[tf.Tensor]


class ComparisonFinder:
    """Finds rows that were computed with numbers.

    Args:
        reader: The reader of the graph.
        is_known: Returns whether the value of a number for the global batch can be computed.
        layers: The names of layers. Rows that a layer compares (BatchNormalization) stay those of the replica.
    """

    def __init__(self, reader: RowReader, is_known: Callable[[tf.Tensor], bool], layers: set[str]):
        self._reader, self._is_known, self._layers = reader, is_known, layers

    def behind(self, aggregate: tf.Tensor) -> ComparedRows | None:
        """Returns the tensors to compute again for the global batch.

        Args:
            aggregate: A sum, a mean or an extreme over rows.

        Returns:
            The rows and the numbers; None if no number but the number of rows is used, or if one of them is not known.
        """
        rows, numbers = self._walked(aggregate)
        if all(_is_count(one) for one in numbers.values()) or not all(map(self._can_repeat, rows)):
            return None
        return ComparedRows(rows, list(numbers.values())) if all(map(self._is_known, numbers.values())) else None

    def are_compared(self, rows: tf.Tensor) -> bool:
        """Returns whether rows were computed with numbers, other than the number of rows, behind the last layer."""

        def has_number(one: tf.Tensor) -> bool:
            return not all(map(_is_count, self.numbers_of(one.op)))

        def is_end(one: tf.Tensor) -> bool:
            is_of_rows = self._reader.axis_of_rows(one) is not None
            return not is_of_rows or _is_end(one) or is_in_layer(one.op, self._layers)

        return graphs.Ancestry(has_number, is_end=is_end).includes(rows)

    def _walked(self, aggregate: tf.Tensor) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        found: list[tf.Tensor] = []
        operation = added_up(aggregate).op
        numbers = {one.name: one for one in self.numbers_of(operation)}
        is_compared: dict[str, bool] = {}
        waiting = self._rows_of(operation)
        while waiting:
            one = waiting[-1]
            if one.name in is_compared:
                waiting.pop()
                continue
            rows = [] if _is_end(one) else self._rows_of(one.op)
            missing = [before for before in rows if before.name not in is_compared]
            if missing and len(is_compared) < _MOST_BEHIND:
                waiting.extend(missing)
                continue
            own = self.numbers_of(one.op)
            numbers.update((each.name, each) for each in own)
            is_compared[one.name] = bool(own) or any(is_compared.get(before.name) for before in rows)
            found += [one] if is_compared[one.name] else []
        return found, numbers

    def _rows_of(self, operation: Any) -> list[tf.Tensor]:
        return [one for one in operation.inputs if self._reader.axis_of_rows(one) is not None]

    def numbers_of(self, operation: Any) -> list[tf.Tensor]:
        """Returns the inputs of an operation that were computed from all rows, without sizes of tensors."""
        if operation.type == "PlaceholderWithDefault":  # Its input is the batch, with a static number of rows.
            return []
        sizes = [operation.inputs[1]] if operation.type in COUNTS else []
        tables = [operation.inputs[0]] if operation.type == "GatherV2" else []
        return [
            one
            for one in operation.inputs
            if (one.dtype.is_floating or one.dtype.is_bool or any(one is each for each in (*sizes, *tables)))
            and self._reader.axis_of_rows(one) is None
            and self._reader.comes_from_rows(one)
        ]

    def _can_repeat(self, rows: tf.Tensor) -> bool:
        operation = rows.op
        is_plain = operation.type not in NOT_REPEATED and not operation.op_def.is_stateful
        return is_plain and rows.name not in self._reader.gradients and not is_in_layer(operation, self._layers)


def added_up(aggregate: tf.Tensor) -> tf.Tensor:
    """Returns the matrix product behind a reshape, as `tf.tensordot` makes it; other aggregates as they are."""
    return aggregate.op.inputs[0] if aggregate.op.type == "Reshape" else aggregate


def _is_end(rows: tf.Tensor) -> bool:
    """Returns whether rows come from a layer or the dataset; a selection (`tf.boolean_mask`) does not count."""
    if rows.op.type != "GatherV2":
        return rows.op.type in LAYERS or graphs.is_from_dataset(rows)
    chosen = rows.op.inputs[1].op
    while chosen.type in ("Squeeze", "Reshape", "Cast", "Identity"):
        chosen = chosen.inputs[0].op
    return not graphs.is_sized_by_data(chosen)


def _is_count(number: tf.Tensor) -> bool:
    return number.op.type == "Cast" and number.op.inputs[0].dtype.is_integer


def layer_names(model: Any) -> set[str]:
    """Returns the names of the layers of a model; an empty set for None."""
    return set() if model is None else {layer.name for layer in private_api.layers_of(model) if layer is not model}


def is_in_layer(operation: Any, layers: set[str]) -> bool:
    """Returns whether an operation was made in one of the layers, judged by its name scopes."""
    scopes = operation.name.split("/")[:-1]
    return any(scope in layers or scope.rpartition("_")[0] in layers for scope in scopes)
