"""Hooks of Keras's epoch iterators: which rows they read under a strategy of ours, and when an epoch ends."""

from __future__ import annotations

import contextlib
from typing import Any

from tfdistkit.data.batch_info import add_info, info_of
from tfdistkit.data.generators import reader_of
from tfdistkit.keras_adapter import data_position, private_api
from tfdistkit.strategies.consistency.data_comparison import is_compared
from tfdistkit.strategies.consistency.epoch_comparison import EpochComparison


def make_epoch_iterator(
    original: Any, iterator: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Splits the batches of `fit`, `evaluate` and `predict`, shuffled alike on all ranks (`agreed_shuffling`)."""
    is_ours = private_api.is_ours(distribute_strategy)
    shuffles = is_ours and kwargs.get("shuffle")
    agreed = distribute_strategy.agreed_shuffling() if shuffles else contextlib.nullcontext()
    compares = is_ours and is_compared(distribute_strategy)
    comparison = EpochComparison(distribute_strategy, kwargs) if compares else None
    given = _ForKeras(distribute_strategy, comparison) if is_ours else distribute_strategy
    followed = data_position.pop_pending()
    several = is_ours and distribute_strategy.num_replicas_in_sync > 1
    reader = reader_of(kwargs.get("x")) if several else None
    if reader is not None:
        kwargs["x"] = reader.peek()
    add_info(iterator, comparison=comparison, position=followed, generator=reader)
    with agreed, contextlib.nullcontext() if followed is None else followed.made(iterator):
        original(iterator, given, *args, **kwargs)
        if comparison is not None:
            comparison.finish(iterator)
    if followed is None:
        add_info(iterator, validated=data_position.follow_validation(iterator))
    if reader is not None:
        iterator.data_adapter.generator = reader.begin_pass
    distributed = private_api.dataset_of(iterator)
    if info_of(distributed).ends_every_epoch:
        private_api.let_data_end_every_epoch(iterator)
    if info_of(distributed).is_own_part:
        iterator.data_adapter = _Uncounted(iterator.data_adapter)
        private_api.let_data_end_epoch(iterator, _Uncounted(distributed))


def finish_epoch(original: Any, iterator: Any) -> None:
    """Waits for the steps of the epoch if workers run them, because Keras reads the metrics afterwards."""
    strategy: Any = private_api.strategy_of_iterator(iterator)
    if private_api.is_ours(strategy):
        strategy.finish_steps()
    original(iterator)


class _ForKeras:
    """A strategy as an epoch iterator sees it: something that distributes a dataset."""

    def __init__(self, strategy: Any, comparison: EpochComparison | None):
        self._strategy, self._comparison = strategy, comparison

    def experimental_distribute_dataset(self, dataset: Any) -> Any:
        if self._comparison is None:
            return self._strategy.distribute_keras_batches(dataset)
        return self._comparison.distributed(dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)


class _Uncounted:
    """A data adapter, and its distributed dataset, that do not say how many steps an epoch has.

    TensorFlow cuts each batch of a worker's own dataset into one step for each replica of the job, but Keras
    counts the batches: it would end an epoch of two workers after half of the data, and after a different
    number of steps on each worker if their parts differ, which hangs. Uncounted, the data itself ends it.

    There Keras runs a step without data, which fails, but not before it has counted `optimizer.iterations`
    up: nothing of that needs data. For the iterators made here, `_make_function` lets everything wait for it.
    """

    num_batches = None

    def __init__(self, counted: Any):
        self._counted = counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counted, name)

    def __iter__(self) -> Any:
        iterator = iter(self._counted)
        add_info(iterator, is_uncounted=True)
        return iterator
