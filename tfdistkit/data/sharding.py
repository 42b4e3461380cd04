"""Splits a tf.data pipeline by worker, once."""

from __future__ import annotations

import operator
from typing import Any

import tensorflow as tf

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.errors import OptionError, explain

# Stands in the options of a dataset (`framework_type`), which every later transformation inherits.
_MARK = "tfdistkit.data.shard"


def shard(dataset: tf.data.Dataset, *, num_shards: int | None = None, index: int | None = None) -> tf.data.Dataset:
    """Takes this worker's part of a dataset: every `num_shards`-th element, beginning with number `index`.

    The parts of all workers together are the dataset, each element once. The result is marked
    (`AutoShardPolicy.OFF`), so `fit` and `strategy.experimental_distribute_dataset` do not split it again.

    The batch size of the script stays the global one. tf.distribute cuts every batch into one piece for
    each replica, before and after this call: of a batch of 64 a worker of two takes two steps of 32.

    Shard first, then shuffle and batch: `shard(dataset).shuffle(1000).batch(64)`. Then each worker reads and
    prepares its own part only, and if the workers divide the batch size evenly, every step sees the rows
    that one process would see in it (but for shuffling). Sharded after `batch`, an element is a batch: a step
    then sees pieces of different batches, and an epoch still sees each row once. A dataset that was shuffled
    before needs the same seed on every worker: otherwise they take their parts of different orders, and
    rows are lost.

    Without this call nothing is lost either: `fit` splits every global batch among the workers. But each of
    them then reads and prepares all the data.

    Args:
        dataset: A `tf.data.Dataset` with the same elements in the same order on every worker.
        num_shards: The number of parts. Default: `tfdistkit.world_size()`.
        index: The part to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A `tf.data.Dataset`. With one part it has all elements.

    Raises:
        OptionError: (a ValueError) if `dataset` is no `tf.data.Dataset` or was sharded before, or the
            numbers are wrong.

    Example:
        ```python
        train = tf.data.Dataset.from_tensor_slices((images, labels))
        model.fit(tfdistkit.data.shard(train).shuffle(1000).batch(64))
        ```
    """
    _check_dataset(dataset)
    num_shards, index = _place(num_shards, index)
    if num_shards > 1:
        dataset = dataset.shard(num_shards, index)
    options = tf.data.Options()
    options.framework_type = [_MARK]  # added to what is there
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def _check_dataset(dataset: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise OptionError(
            explain(
                "`dataset` is no tf.data.Dataset.",
                received=f"an object of {type(dataset)}",
                expected="a tf.data.Dataset that no strategy has distributed yet",
                do="Make one of arrays with tf.data.Dataset.from_tensor_slices((x, y)).",
            )
        )
    if _MARK in (dataset.options().framework_type or ()):
        raise OptionError(
            explain(
                "`dataset` was sharded before, or a part of it was: this worker would get a part of its part.",
                received="the result of tfdistkit.data.shard",
                expected="one call of tfdistkit.data.shard for each pipeline",
                do="Remove the second call.",
            )
        )


def _place(num_shards: Any, index: Any) -> tuple[int, int]:
    if (num_shards is None) != (index is None):
        received = f"num_shards={num_shards!r}, index={index!r}"
        raise OptionError(explain("One of `num_shards` and `index` is missing.", received=received, expected="both"))
    if num_shards is None:
        cluster = detect_cluster()
        # The coordinator of workers with parameter servers hands all of the data out to them.
        return (1, 0) if cluster.is_coordinator else (cluster.world_size, cluster.rank)
    num_shards, index = _whole_number("num_shards", num_shards), _whole_number("index", index)
    if num_shards < 1:
        raise OptionError(
            explain("`num_shards` is no number of parts.", received=str(num_shards), expected="1 or more")
        )
    if not 0 <= index < num_shards:
        raise OptionError(
            explain("`index` names no part.", received=f"index={index}", expected=f"0 to {num_shards - 1}")
        )
    return num_shards, index


def _whole_number(name: str, value: Any) -> int:
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise OptionError(explain(f"`{name}` is no whole number.", received=f"{name}={value!r}", expected="such as 2"))
