"""Data that the workers of a parameter-server job read themselves: `distribute_datasets_from_function`.

Keras takes it as it is, because it is a `tf.distribute.DistributedDataset` and a Keras data adapter at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api

DatasetFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class WorkerDataset(private_api.DataAdapter, tf.distribute.DistributedDataset):
    """One input pipeline for each worker, made by the worker.

    TensorFlow's own gives every worker the same input context (pipeline 0 of 1), so that sharding by it
    does nothing and all workers read everything; here each worker has its own number.

    Args:
        strategy: The strategy.
        dataset_fn: `dataset_fn(input_context) -> tf.data.Dataset`, batched.

    Raises:
        UnsupportedError: if `dataset_fn` uses a dataset that was made outside of it.
    """

    # The workers do not take equally many steps in every epoch.
    tfdistkit_ends_every_epoch = True

    def __init__(self, strategy: Any, dataset_fn: DatasetFn):
        self.strategy = strategy
        self._dataset_fn = made_by_worker(dataset_fn)
        self.tfdistkit_element_spec = self.element_spec

    def part(self, index: int, parts: int) -> tf.data.Dataset:
        """Returns the dataset of one of several pipelines."""
        return self._dataset_fn(
            tf.distribute.InputContext(num_input_pipelines=parts, input_pipeline_id=index, num_replicas_in_sync=1)
        )

    @property
    def element_spec(self) -> Any:
        made = tf.function(lambda: self.part(0, self.strategy.num_workers), autograph=False).get_concrete_function()
        return made.structured_outputs.element_spec

    @property
    def cardinality(self) -> Any:
        return np.int64(tf.data.UNKNOWN_CARDINALITY)

    # What Keras asks of a data adapter.

    def get_tf_dataset(self) -> Any:
        """Keras's epoch iterator takes a DistributedDataset as it is."""
        return self

    @property
    def num_batches(self) -> None:
        """Unknown: the data ends an epoch, or `steps_per_epoch` does."""
        return None

    batch_size = has_partial_batch = partial_batch_size = num_batches

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self)


class WorkerIterator:
    """An iterator on every worker, and, for `predict`, one over all data in this process.

    Args:
        dataset: What to iterate over.
    """

    def __init__(self, dataset: WorkerDataset):
        self._dataset = dataset
        self._remote: Any = None
        self._ids: Any = None
        self._local: Any = None

    @property
    def element_spec(self) -> Any:
        return self._dataset.tfdistkit_element_spec

    def remote(self) -> Any:
        """Returns the workers' iterators, to hand to a step."""
        if self._remote is None:
            parts = self._dataset.strategy.num_workers
            self._remote = private_api.iterator_per_worker(
                self._dataset.strategy, [partial(self._iterate, i, parts) for i in range(parts)]
            )
        return self._remote

    def _iterate(self, index: int, parts: int) -> Any:
        return iter(self._dataset.part(index, parts))

    def worker_ids(self) -> Any:
        """Returns the workers' numbers, to hand to a step."""
        if self._ids is None:
            self._ids = private_api.value_per_worker(
                self._dataset.strategy, [partial(tf.constant, i) for i in range(self._dataset.strategy.num_workers)]
            )
        return self._ids

    def __iter__(self) -> WorkerIterator:
        return self

    def __next__(self) -> Any:
        if self._local is None:
            self._local = iter(self._dataset.part(0, 1))
        return next(self._local)


def made_by_worker(dataset_fn: DatasetFn) -> DatasetFn:
    """Returns `dataset_fn` with an error in place of what no worker could run.

    Args:
        dataset_fn: `dataset_fn(input_context) -> tf.data.Dataset`, called while a function is traced.

    Returns:
        A function that raises UnsupportedError if `dataset_fn` uses a dataset that was made outside of it: it
        lives in the coordinator, and TensorFlow would fail to send it, in this call and in all after it.
    """

    def checked(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = dataset_fn(context)
        captured = getattr(tf.compat.v1.get_default_graph(), "external_captures", [])
        returned = tf.nest.flatten(dataset, expand_composites=True)
        from_outside = tf.inside_function() and not all(map(tf.is_symbolic_tensor, returned))
        if from_outside or any(tensor.dtype == tf.variant for tensor in captured):
            raise UnsupportedError(
                explain(
                    "`dataset_fn` uses a dataset or an iterator that was made outside of it, in the coordinator.",
                    received=f"dataset_fn={getattr(dataset_fn, '__name__', dataset_fn)}",
                    expected="a function that makes the whole dataset, for it runs on the workers",
                    do="Make the dataset inside of it; or give the dataset itself to `fit`, and the coordinator reads.",
                )
            )
        return dataset

    return checked


def drawn(iterator: Any) -> Iterator[Any]:
    """The batches of an iterator, which may end in TensorFlow's way."""
    while True:
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return
