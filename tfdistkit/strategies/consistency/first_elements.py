"""Records the first elements of a Python generator that ranks divide with `shard`, for a comparison.

`shard` compares arrays, seeds and the pipeline. The elements of a generator are unknown before it runs, and an extra
run would be one more than in one process. So each rank records the first elements as it reads them, also those of other
ranks, and the ranks compare them after the first step of an epoch.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.data.dataset_metadata import marks_of, with_mark
from tfdistkit.keras_adapter.dataset_graph import DatasetGraph
from tfdistkit.strategies.consistency.batch_hashes import mark_of_values

# Recorded elements. A single one may be random noise with a label that many elements have.
_NOTED = 16
_MARK = "tfdistkit.data.first_elements:"
_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)

_numbers = itertools.count()
_by_mark: weakref.WeakValueDictionary[str, FirstElements] = weakref.WeakValueDictionary()


class FirstElements:
    """Records the first elements that a pipeline reads.

    Args:
        graph: The graph of its data.
        floats: For each tensor of an element, whether it holds floating-point numbers.
    """

    def __init__(self, graph: DatasetGraph, floats: list[bool]):
        self.graph = graph
        self.floats = floats
        self._is_armed, self._is_recording = False, False
        self._marks: list[list[int]] = []

    def begin(self) -> None:
        """Records the elements the next time that the pipeline is read from its start."""
        self._is_armed, self._is_recording, self._marks = True, False, []

    def note(self, number: Any, *values: Any) -> np.ndarray:
        """Records an element; called by the pipeline.

        Args:
            number: The number of the element, from 0.
            *values: Its tensors.
        """
        if number == 0:
            self._is_recording, self._is_armed = self._is_armed, False
        if self._is_recording and number == len(self._marks):
            self._marks.append([mark_of_values(np.asarray(value)) for value in values])
        return np.int64(0)

    def row(self) -> np.ndarray:
        """Returns the row for the table of all ranks: the number of elements, then the mark of each tensor of each."""
        row: np.ndarray = np.zeros(1 + _NOTED * len(self.floats), np.int64)
        flat = [mark for marks in self._marks for mark in marks]
        row[0], row[1 : 1 + len(flat)] = len(self._marks), flat
        return row

    def by_batch(self, everyone: np.ndarray) -> np.ndarray:
        """Returns the elements that all ranks have read as one batch, in the format of `first_difference`.

        Args:
            everyone: The rows of all ranks.
        """
        tensors, read = len(self.floats), int(everyone[:, 0].min())
        marks = everyone[:, 1:].reshape(len(everyone), _NOTED, tensors)[:, :read]
        table: np.ndarray = np.ones((len(everyone), 1 + 2 * tensors), np.int64)
        for rank, tensor in itertools.product(range(len(everyone)), range(tensors)):
            own = np.ascontiguousarray(marks[rank, :, tensor])
            table[rank, 1 + 2 * tensor] = mark_of_values(own)
            table[rank, 2 + 2 * tensor] = read > 1 and bool((own != own[0]).any())
        return table


def noted(dataset: tf.data.Dataset, graph: DatasetGraph) -> tf.data.Dataset:
    """Adds a recorder of the first elements to a dataset that comes from a Python generator.

    Args:
        dataset: The dataset, before it is divided.
        graph: Its graph.

    Returns:
        A dataset of the same elements; the dataset itself if no generator yields them.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    if not graph.has_generator or not all(isinstance(spec, _SPECS) for spec in specs):
        return dataset
    tensors = tf.nest.flatten(dataset.element_spec, expand_composites=True)
    first = FirstElements(graph, [spec.dtype.is_floating or spec.dtype.is_complex for spec in tensors])

    def note(number: tf.Tensor, element: Any) -> Any:
        values = tf.nest.flatten(element, expand_composites=True)
        zero = tf.constant(0, tf.int64)
        done = tf.cond(
            number < _NOTED, lambda: tf.numpy_function(first.note, [number, *values], tf.int64), lambda: zero
        )
        with tf.control_dependencies([done]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    mark = f"{_MARK}{next(_numbers)}"
    _by_mark[mark] = first
    return with_mark(dataset.enumerate().map(note), mark)


def first_elements(dataset: Any) -> list[FirstElements]:
    """Returns the recorders of the first elements of a dataset, and of the datasets that it was made from.

    Args:
        dataset: The dataset that `fit` reads.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return []
    found = (_by_mark.get(mark) for mark in marks_of(dataset) if mark.startswith(_MARK))
    return [first for first in found if first is not None]
