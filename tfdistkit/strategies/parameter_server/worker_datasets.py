"""Datasets that the workers of a parameter-server job read themselves: `distribute_datasets_from_function`.

Keras accepts a `WorkerDataset` because it is both a `tf.distribute.DistributedDataset` and a Keras data adapter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.cluster import requested
from tfdistkit.data.batch_info import add_info, info_of
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.keras_adapter.dataset_graph import read_graph

DatasetFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class WorkerDataset(private_api.DataAdapter, tf.distribute.DistributedDataset):
    """Makes one input pipeline on each worker.

    TensorFlow's own gives every worker the same input context (pipeline 0 of 1), so sharding by it has no effect and
    all workers read all data; here each worker has its own pipeline id.

    Args:
        strategy: The strategy.
        dataset_fn: `dataset_fn(input_context) -> tf.data.Dataset`, batched.

    Raises:
        UnsupportedError: if `dataset_fn` uses a dataset that was made outside of it.
    """

    def __init__(self, strategy: Any, dataset_fn: DatasetFn):
        self.strategy = strategy
        self._dataset_fn = made_by_worker(dataset_fn)
        # Workers may run different numbers of steps in an epoch.
        add_info(self, element_spec=self.element_spec, ends_every_epoch=True)

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

    # The interface of Keras's data adapters.

    def get_tf_dataset(self) -> Any:
        """Returns itself: Keras's epoch iterator accepts a DistributedDataset."""
        return self

    @property
    def num_batches(self) -> None:
        """Unknown: the data ends an epoch, or `steps_per_epoch` does."""
        return None

    batch_size = has_partial_batch = partial_batch_size = num_batches

    def __iter__(self) -> WorkerIterator:
        return WorkerIterator(self)


class WorkerIterator:
    """Iterates on every worker, and, for `predict`, over all data in this process.

    Args:
        dataset: The dataset.
    """

    def __init__(self, dataset: WorkerDataset):
        self._dataset = dataset
        self._remote: Any = None
        self._ids: Any = None
        self._local: Any = None

    @property
    def element_spec(self) -> Any:
        return info_of(self._dataset).element_spec

    def remote(self) -> Any:
        """Returns the workers' iterators, as an argument of a step."""
        if self._remote is None:
            parts = self._dataset.strategy.num_workers
            self._remote = private_api.iterator_per_worker(
                self._dataset.strategy, [partial(self._iterate, i, parts) for i in range(parts)]
            )
        return self._remote

    def _iterate(self, index: int, parts: int) -> Any:
        return iter(self._dataset.part(index, parts))

    def worker_ids(self) -> Any:
        """Returns the workers' numbers, as an argument of a step."""
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


def require_all_data(dataset: Any, num_workers: int) -> None:
    """Checks that a script which asks for the rank does not select the part of one worker.

    Args:
        dataset: The data of `fit`, `evaluate` or `predict`, of which the coordinator gives each batch to one worker.
        num_workers: The number of workers.

    Raises:
        UnsupportedError: if the script asked for its rank and the data has `.shard(num_workers, 0)`: the coordinator is
            rank 0, so that the parts of the other workers are lost.
    """
    if num_workers == 1 or not requested.was_noted("rank") or not isinstance(dataset, tf.data.Dataset):
        return
    shards = [(what, number) for method, what, number in read_graph(dataset).settings if method == "shard"]
    if (("num_shards", num_workers), ("index", 0)) in itertools.pairwise(shards):
        raise UnsupportedError(
            explain(
                "Under 'parameter_server' the coordinator must read all data: it gives each batch to one worker.",
                received=f"`.shard({num_workers}, 0)`, a part for each worker, in a script that asks for its rank; the "
                "coordinator has rank 0",
                expected="the whole dataset",
                do="Remove `.shard`. To let each worker read its own part, use "
                "`strategy.distribute_datasets_from_function`.",
            )
        )


def made_by_worker(dataset_fn: DatasetFn) -> DatasetFn:
    """Wraps `dataset_fn` to raise an error if no worker can run it.

    Args:
        dataset_fn: `dataset_fn(input_context) -> tf.data.Dataset`, called while a function is traced.

    Returns:
        A function that raises UnsupportedError if `dataset_fn` uses a dataset that was made outside of it: that dataset
        is in the coordinator, and TensorFlow would fail to send it, in this call and in all later ones.
    """

    def checked(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = dataset_fn(context)
        captured = getattr(tf.compat.v1.get_default_graph(), "external_captures", [])
        returned = tf.nest.flatten(dataset, expand_composites=True)
        from_outside = tf.inside_function() and not all(map(tf.is_symbolic_tensor, returned))
        if from_outside or any(tensor.dtype == tf.variant for tensor in captured):
            raise UnsupportedError(
                explain(
                    "`dataset_fn` must not use a dataset or iterator made outside of it: it runs on the workers.",
                    received=f"dataset_fn={getattr(dataset_fn, '__name__', dataset_fn)}",
                    do="Make the dataset inside of it, or give the dataset to `fit`: then the coordinator reads it.",
                )
            )
        return dataset

    return checked


def batches_of(iterator: Any) -> Iterator[Any]:
    """Yields the batches of an iterator, which may end with StopIteration or OutOfRangeError."""
    while True:
        try:
            yield next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return
