"""Compares the data of the ranks in `fit`, `evaluate` and `predict`: when they begin, and in each epoch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.data.batch_info import info_of
from tfdistkit.errors import UnsupportedError
from tfdistkit.keras_adapter import private_api
from tfdistkit.keras_adapter.dataset_graph import DatasetGraph
from tfdistkit.strategies.consistency.batch_hashes import OF_BATCH, WIDTH, mark_of_samples, samples
from tfdistkit.strategies.consistency.call_positions import Position
from tfdistkit.strategies.consistency.data_comparison import agree_on_data, is_divided, remade
from tfdistkit.strategies.consistency.data_differences import other_batches, other_elements
from tfdistkit.strategies.consistency.first_elements import FirstElements, first_elements
from tfdistkit.strategies.consistency.read_ahead import read_ahead
from tfdistkit.strategies.consistency.row_exchange import are_close, table, table_of_values
from tfdistkit.strategies.consistency.training_comparison import TrainingFacts
from tfdistkit.strategies.sync.batch_sharding import BatchPart

_CALLS = ("fit", "evaluate", "predict")


class EpochComparison:
    """Compares an epoch iterator with those of the other ranks.

    Args:
        strategy: The strategy.
        arguments: The arguments of the epoch iterator.

    Raises:
        UnsupportedError: if the ranks are in different calls.
    """

    def __init__(self, strategy: Any, arguments: dict[str, Any]):
        self._strategy = strategy
        self._call, caller = _caller()
        self._model = caller if self._call in _CALLS else None  # `fit` has compared that of its `validation_data`.
        # Before anything else that the ranks exchange, such as seeds for shuffling.
        self._position = Position(strategy, self._call)
        self._position.require_equal(table(strategy, self._position.row()))
        weights = arguments.get("class_weight")
        self._executions = int(arguments.get("steps_per_execution") or 1)
        self._steps_per_epoch: int | None = arguments.get("steps_per_epoch")
        self._more = {
            "steps": [self._steps_per_epoch, self._executions],
            # Before the model is built: its first batch makes the variables of the metrics, which ranks make together.
            "metrics": _number_of_metrics(self._model),
            "class_weight": None if weights is None else sorted((str(k), float(v)) for k, v in dict(weights).items()),
        }
        self._dataset: Any = None
        self._graph: DatasetGraph | None = None
        self._has_begun, self._is_start = False, True
        self._first_elements: list[FirstElements] = []

    def distributed(self, dataset: Any) -> Any:
        """Distributes a dataset that is the same on all ranks.

        Raises:
            UnsupportedError: on all ranks, if their data differs.
        """
        self._agree(dataset)
        return self._strategy.distribute_keras_batches(self._dataset, None if self._graph is None else samples)

    def _agree(self, dataset: Any) -> None:
        self._has_begun = True
        is_own = not isinstance(dataset, tf.data.Dataset) or is_divided(dataset)
        self._first_elements = first_elements(dataset) if is_own else []
        more = {**self._more, "first_elements": len(self._first_elements)}
        self._dataset, self._graph = agree_on_data(self._strategy, dataset, self._call, is_own, more)

    def finish(self, epoch_iterator: Any) -> None:
        """Compares data that the user distributed, for which Keras does not call `distributed`."""
        if not self._has_begun:
            self._agree(private_api.dataset_of(epoch_iterator))

    def steps(self, epoch_iterator: Any, steps: Iterator[Any]) -> Iterator[Any]:
        """Yields the steps of an epoch, after the ranks have compared its first batch."""
        self._begin_epoch()
        old = new = None
        # An iterator for several epochs may be in the middle of the data when an epoch begins.
        read, self._first_elements = self._first_elements, [] if self._steps_per_epoch else self._first_elements
        for first in read:
            first.begin()  # Keras makes the epoch's iterator with the first step.
        for item in steps:
            *before, data = item
            if old is None:
                old = data
                new, first = self._begin(epoch_iterator, data, int(before[0]))
                yield (*before, first)
                self._compare_elements(read)
            else:
                yield (*before, new if data is old else data)

    def _begin_epoch(self) -> None:
        """Compares the positions of the ranks, and what they train: callbacks have run that prepare for it."""
        training = None if self._model is None else TrainingFacts(self._model, self._is_start)
        self._is_start = False
        row = self._position.next_epoch().row()
        rows = table(self._strategy, np.append(row, 0 if training is None else training.number()))
        self._position.require_equal(rows[:, : len(row)])
        if training is not None:
            training.require_equal(self._strategy, rows[:, -1])

    def _compare_elements(self, read: list[FirstElements]) -> None:
        """Compares, after a step, the first elements that an epoch has read."""
        for first in read:
            everyone = first.by_batch(table(self._strategy, first.row()))
            found = first_difference(everyone, first.floats, first.graph)
            if found is not None:
                raise other_elements(self._call, *found)

    def _begin(self, epoch_iterator: Any, data: Any, begin: int) -> tuple[Any, Any]:
        """Returns the iterator of an epoch, and the iterator of its first step."""
        spec = getattr(data, "element_spec", None)
        if not (isinstance(data, tf.data.Iterator) and isinstance(spec, BatchPart) and spec.sample):
            return data, data
        first, taken = self._peek(data)
        found = self._difference(taken)
        if found is None:
            return data, first
        error = other_batches(self._call, *found)
        if begin or info_of(epoch_iterator).position is not None or not self._is_shuffled():
            raise error
        data = self._start_again(epoch_iterator, error)
        first, taken = self._peek(data)
        found = self._difference(taken)
        if found is not None:
            raise other_batches(self._call, *found)
        return data, first

    def _peek(self, data: Any) -> tuple[Any, tuple[tf.Tensor, ...]]:
        """Reads the batches of the first step; returns an iterator over them, and the samples of the first batch."""
        first, batches = read_ahead(self._strategy, data, self._executions)
        return first, batches[0][0].sample if batches else ()

    def _difference(self, taken: tuple[tf.Tensor, ...]) -> tuple[int, str] | None:
        """Compares the samples of the first batch; returns the first rank that differs, and the difference."""
        assert self._graph is not None
        specs, mark = tf.nest.flatten(self._dataset.element_spec, expand_composites=True), mark_of_samples(taken)
        row: np.ndarray = np.zeros(1 + WIDTH * len(specs), np.int64)
        row[0], row[1 : 1 + len(mark)] = bool(mark), mark
        everyone = table(self._strategy, row)
        if (everyone == everyone[0]).all():
            return None
        floats = [spec.dtype.is_floating or spec.dtype.is_complex for spec in specs]
        found = first_difference(everyone, floats, self._graph)
        if found is not None or _draws_values(self._graph) or self._graph.has_generator:
            return found
        return self._other_values([value for value, is_float in zip(taken, floats) if is_float], len(floats))

    def _other_values(self, numbers: list[tf.Tensor], tensors: int) -> tuple[int, str] | None:
        """Compares numbers that no random operation draws: they may only be rounded in another way."""
        values = table_of_values(self._strategy, [np.asarray(one) for one in numbers], 2 * OF_BATCH)
        for rank in range(1, len(values)):
            others = sum(not are_close(first, own) for first, own in zip(values[0], values[rank]))
            if others:
                return rank, f"the values of {others} of {tensors} tensors of the batch"
        return None

    def _is_shuffled(self) -> bool:
        return self._graph is not None and any(source.decides_order for source in self._graph.random)

    def _start_again(self, epoch_iterator: Any, otherwise: UnsupportedError) -> Any:
        """Restarts the data with its first shuffle order: a read on one rank only had moved that rank to the next."""
        assert self._graph is not None
        self._dataset = remade(self._strategy, self._dataset, self._graph, otherwise)
        distributed = self._strategy.distribute_keras_batches(self._dataset, samples)
        data = iter(distributed)
        private_api.replace_data(epoch_iterator, distributed, data)
        return data


def first_difference(everyone: np.ndarray, floats: list[bool], graph: DatasetGraph) -> tuple[int, str] | None:
    """Returns the first rank whose first batch differs from that of rank 0, and the difference.

    Only values may differ: from random numbers that are drawn for each row, or from other rounding on other machines.
    The rows are the same if a tensor that distinguishes rows is the same.

    Args:
        everyone: For each rank, whether it has a batch; then for each tensor, its hash and whether it distinguishes
            rows.
        floats: For each tensor whether it holds floating-point numbers.
        graph: The graph of the dataset.
    """
    hashes, distinguishes = everyone[:, 1::WIDTH], everyone[:, 2::WIDTH] != 0
    is_noisy = _draws_values(graph)
    for rank in range(1, len(everyone)):
        if everyone[rank, 0] != everyone[0, 0]:
            return rank, "the number of batches: one of the ranks has none"
        differs = hashes[rank] != hashes[0]
        same_rows = bool((~differs & (distinguishes[rank] | distinguishes[0])).any())
        in_numbers = any(other and not is_float for other, is_float in zip(differs, floats))
        if not differs.any() or (same_rows and (is_noisy or graph.has_generator or not in_numbers)):
            continue
        if same_rows or graph.has_generator or not is_noisy:
            return rank, f"{int(differs.sum())} of {len(differs)} tensors of the batch"
    return None


def _draws_values(graph: DatasetGraph) -> bool:
    """Returns whether a pipeline may give the same rows other values on each rank: augmentation, code in Python."""
    values = [source for source in graph.random if not source.decides_order]
    return any(not source.is_seeded or source.is_parallel for source in values) or graph.runs_python


def _caller() -> tuple[str, Any]:
    """Returns the method of Keras that makes the epoch iterator, and its model; None for no model."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in _CALLS and frame.f_globals.get("__name__", "").startswith("keras."):
            # `fit` makes the iterator of its training data before that of `validation_data`.
            is_second = name == "fit" and "epoch_iterator" in frame.f_locals
            return "validation_data" if is_second else str(name), frame.f_locals.get("self")
        frame = frame.f_back
    return "fit", None


def _number_of_metrics(model: Any) -> int:
    """Returns the number alone: a model that was loaded may name the same metrics in another way."""
    given = {} if model is None else private_api.compile_arguments(model)
    return sum(len(keras.tree.flatten(given.get(name) or [])) for name in ("metrics", "weighted_metrics"))
