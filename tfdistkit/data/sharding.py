"""Shards a tf.data pipeline by worker, exactly once."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data.batch_rows import rows_of_batches
from tfdistkit.data.dataset_metadata import ONE_ORDER, ROWS_OF_BATCHES, SHARDED, even_marks, has_mark, marked, seed_mark
from tfdistkit.data.element_sharding import shard_elements
from tfdistkit.data.rank_agreement import agreed
from tfdistkit.data.shard_spec import find_shard, require_even_steps
from tfdistkit.data.shuffle_order import agree_on_seed, shuffled
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_choice, require_integer

POLICIES = ("auto", "file", "element", "batch", "seed", "off")
# Elements held in memory: a common size for `Dataset.shuffle`.
BUFFER_SIZE = 10_000


def shard(
    dataset: tf.data.Dataset,
    policy: str = "auto",
    *,
    even_steps: str | None = None,
    seed: int | None = None,
    buffer_size: int = BUFFER_SIZE,
    num_shards: int | None = None,
    index: int | None = None,
) -> tf.data.Dataset:
    """Takes this worker's shard of a dataset; the shards of all workers cover each element exactly once.

    The batch size of the script stays the global one. tf.distribute splits every batch among the replicas, with
    and without this call: each of two workers takes a batch of 64 in two steps of 32. (With `policy="batch"` it
    is split already.)

    Shard first, then shuffle and batch: `shard(dataset).shuffle(1000).batch(64)`. Then each worker prepares only
    its own shard, and if the batch size divides evenly among the workers, every step sees the rows that one
    process would see in it (except for shuffling). Sharded after `batch`, an element is a batch: a step then
    sees parts of different batches, and an epoch still sees each row once. The ranks of a strategy compare
    their datasets here (`check_data`): different seeds are replaced by rank 0's seeds, other differences are
    errors. So all ranks must make the call, unless `num_shards` and `index` are given.

    The result has `AutoShardPolicy.OFF`, so `fit` and `strategy.experimental_distribute_dataset` do not shard it
    again. Without this call nothing is lost either: `fit` splits every global batch among the workers, but each
    worker then reads and prepares all the data.

    Args:
        dataset: A `tf.data.Dataset` with the same elements in the same order on every worker.
        policy: The unit that is sharded.
            `"auto"`: as `"element"` (a pipeline does not know its files; `from_files` does).
            `"element"`: every `num_shards`-th element, beginning with number `index`.
            `"file"`: every `num_shards`-th file; no others are read. The pipeline reads TFRecords, lines or records of
            fixed length.
            `"batch"`: this worker's rows of every global batch. Put it after `batch`; every step has the rows, and the
            gradient, of one process. Each worker reads and prepares all the data.
            `"seed"`: all of the data for every worker, each in its own shuffle order: an epoch sees each element once
            per worker (RETURNN's `random_seed_offset`).
            `"off"`: all of the data for every worker.
        even_steps: How to handle shards of different sizes. Default: nothing is lost; shards differ by one element
            (`"file"`: by the sizes of the files), and in `fit` workers without data wait for the others. For custom
            training loops, which need the same number of steps on all workers: `"drop"` drops the remainder, `"pad"`
            adds rows with sample weight 0 (elements become (x, y, sample_weight)), `"error"` raises. The shards of
            `"seed"` and `"off"` are even.
        seed: For `"seed"`: the seed of the shuffle order, from 0. Default: rank 0 chooses one.
        buffer_size: For `"seed"`: elements in the shuffle buffer.
        num_shards: The number of shards. Default: `tfdistkit.world_size()`.
        index: The shard to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A `tf.data.Dataset`. With one shard it has all elements.

    Raises:
        OptionError: (a ValueError) if `dataset` is not a `tf.data.Dataset` or was sharded before, an option is invalid,
            or the dataset cannot be sharded by this policy.
        UnsupportedError: (a RuntimeError) on all ranks, if their data differs, or has no fixed order.
        tf.errors.InvalidArgumentError: when it is read, if there are fewer files than workers; the same or a
            FailedPreconditionError for `even_steps="error"` if the number of elements was not known before.

    Example:
        ```python
        train = tf.data.Dataset.from_tensor_slices((images, labels))
        model.fit(tfdistkit.data.shard(train).shuffle(1000).batch(64))
        ```
    """
    _check_dataset(dataset)
    require_choice("policy", policy, POLICIES)
    require_even_steps(even_steps)
    if policy != "seed" and (seed is not None or buffer_size != BUFFER_SIZE):
        raise OptionError(
            explain(
                '`seed` and `buffer_size` must be left out, except with policy="seed".',
                received=f"policy={policy!r}, seed={seed!r}, buffer_size={buffer_size!r}",
                do="Shuffle after this call: shard(dataset).shuffle(1000, seed=7).",
            )
        )
    parts, own = find_shard(num_shards, index)
    if num_shards is None and policy not in ("seed", "off"):
        arguments = [["policy", policy], ["even_steps", even_steps]]
        dataset = agreed(dataset, parts, "tfdistkit.data.shard", arguments=arguments)
    even = even_marks(even_steps, parts)
    if policy == "batch":
        marks = [ROWS_OF_BATCHES] if parts > 1 else []
        return marked(rows_of_batches(dataset, parts, own, even_steps), ONE_ORDER, *marks, *even)
    if policy == "file":
        _refuse_even_files(even_steps)
        return marked(_own_files(dataset, parts, own) if parts > 1 else dataset)
    if policy == "seed":
        agreed_seed = agree_on_seed(seed, parts, num_shards is not None)
        dataset = shuffled(dataset, require_integer("buffer_size", buffer_size), agreed_seed, stream=own)
        return marked(dataset, *seed_mark(seed, agreed_seed))
    if policy == "off":
        return marked(dataset)
    return marked(shard_elements(dataset, parts, own, even_steps), ONE_ORDER, *even)


def _own_files(dataset: tf.data.Dataset, parts: int, index: int) -> tf.data.Dataset:
    specs = tf.nest.flatten(dataset.element_spec)
    dense = [isinstance(spec, tf.TensorSpec) for spec in specs]
    try:
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=parts,
            index=index,
            auto_shard_policy=tf.data.experimental.AutoShardPolicy.FILE.value,
            num_replicas=parts,
            output_types=[spec.dtype if is_dense else tf.variant for spec, is_dense in zip(specs, dense)],
            output_shapes=[spec.shape if is_dense else tf.TensorShape(None) for spec, is_dense in zip(specs, dense)],
        )
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        raise OptionError(
            explain(
                '`dataset` must read files of TFRecords, lines or fixed-length records with policy="file".',
                received=f"a dataset of {dataset.element_spec}, in which TensorFlow finds no reader of files",
                do='Pass policy="element", or use tfdistkit.data.from_files.',
            )
        ) from error
    part = tf.data.experimental.from_variant(variant, dataset.element_spec)
    return part.with_options(dataset.options())


def _refuse_even_files(even_steps: str | None) -> None:
    if even_steps is not None:
        raise OptionError(
            explain(
                '`even_steps` must be None with policy="file": the number of elements in each file is unknown.',
                received=f"even_steps={even_steps!r}",
                do='Pass policy="element"; or write the files with `tfdistkit data write`, which counts the elements, '
                "and read them with tfdistkit.data.from_files.",
            )
        )


def _check_dataset(dataset: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset):
        raise OptionError(
            explain(
                "`dataset` must be a tf.data.Dataset that no strategy has distributed yet.",
                received=f"an object of {type(dataset)}",
                do="Convert arrays with tf.data.Dataset.from_tensor_slices((x, y)).",
            )
        )
    if has_mark(dataset, SHARDED):
        raise OptionError(
            explain(
                "`dataset` must not be sharded before: this worker would get a shard of a shard.",
                received="a pipeline that contains the result of tfdistkit.data.shard",
                do="Remove this call, or the first one.",
            )
        )
