"""Splits a tf.data pipeline by worker, once."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.data.batch_rows import rows_of_batches
from tfdistkit.data.dataset_metadata import ONE_ORDER, PADDED, ROWS_OF_BATCHES, SHARDED, has_mark, marked, seed_mark
from tfdistkit.data.element_sharding import deal
from tfdistkit.data.rank_agreement import agreed
from tfdistkit.data.shard_spec import find_place, require_choice, require_even_steps, whole_number
from tfdistkit.data.shuffle_order import agree_on_seed, shuffled
from tfdistkit.errors import OptionError, explain

POLICIES = ("auto", "file", "element", "batch", "seed", "off")
# As many as `Dataset.shuffle` is usually given; they are held in memory.
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
    """Takes this worker's part of a dataset; the parts of all workers are the dataset, each element once.

    The batch size of the script stays the global one. tf.distribute cuts every batch into one piece for
    each replica, before and after this call: of a batch of 64 a worker of two takes two steps of 32. (With
    `policy="batch"` it is cut already.)

    Shard first, then shuffle and batch: `shard(dataset).shuffle(1000).batch(64)`. Then each worker prepares
    its own part only, and if the workers divide the batch size evenly, every step sees the rows that one
    process would see in it (but for shuffling). Sharded after `batch`, an element is a batch: a step then
    sees pieces of different batches, and an epoch still sees each row once. The ranks of a strategy compare
    their datasets here (`check_data`): seeds that differ become those of rank 0, other differences are errors.
    So all of them have to make the call, unless `num_shards` and `index` are given.

    The result is marked (`AutoShardPolicy.OFF`), so `fit` and `strategy.experimental_distribute_dataset` do
    not split it again. Without this call nothing is lost either: `fit` splits every global batch among the
    workers. But each of them then reads and prepares all the data.

    Args:
        dataset: A `tf.data.Dataset` with the same elements in the same order on every worker.
        policy: What a part is.
            `"auto"`: as `"element"` (a pipeline does not tell its files; `from_files` knows them).
            `"element"`: every `num_shards`-th element, beginning with number `index`.
            `"file"`: every `num_shards`-th file; no others are read. The pipeline reads TFRecords, lines or records of
            fixed length.
            `"batch"`: this worker's rows of every global batch. Put it after `batch`; every step has the rows, and the
            gradient, of one process. Each worker reads and prepares all the data.
            `"seed"`: all of the data for every worker, each in an order of its own: an epoch sees each element as often
            as there are workers (RETURNN's `random_seed_offset`).
            `"off"`: all of the data for every worker.
        even_steps: What to do where the parts would not be equally large. Default: nothing is lost; parts differ by one
            element (`"file"`: by those of the files), and `fit` lets workers that run out wait for the others. For
            loops of one's own, which need equally many steps: `"drop"` leaves the remainder out, `"pad"` fills it up
            with rows of sample weight 0 (elements become (x, y, sample_weight)), `"error"` raises. The parts of
            `"seed"` and `"off"` are even.
        seed: For `"seed"`: the order, from 0. Default: rank 0 chooses one.
        buffer_size: For `"seed"`: elements that are held in memory to choose from.
        num_shards: The number of parts. Default: `tfdistkit.world_size()`.
        index: The part to take, from 0. Default: `tfdistkit.rank()`.

    Returns:
        A `tf.data.Dataset`. With one part it has all elements.

    Raises:
        OptionError: (a ValueError) if `dataset` is no `tf.data.Dataset` or was sharded before, an option is wrong, or
            the dataset cannot be divided as it shall.
        UnsupportedError: (a RuntimeError) on all ranks, if they bring different data, or data without an order.
        tf.errors.InvalidArgumentError: when it is read, if there are fewer files than workers; the same or a
            FailedPreconditionError for `even_steps="error"` where the elements were not counted before.

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
            explain('`seed` and `buffer_size` are for `policy="seed"` alone.', received=f"policy={policy!r}")
        )
    parts, own = find_place(num_shards, index)
    if num_shards is None and policy not in ("seed", "off"):
        arguments = [["policy", policy], ["even_steps", even_steps]]
        dataset = agreed(dataset, parts, "tfdistkit.data.shard", arguments=arguments)
    padded = [PADDED] if even_steps == "pad" and parts > 1 else []
    if policy == "batch":
        marks = [ROWS_OF_BATCHES] if parts > 1 else []
        return marked(rows_of_batches(dataset, parts, own, even_steps), ONE_ORDER, *marks, *padded)
    if policy == "file":
        _refuse_even_files(even_steps)
        return marked(_own_files(dataset, parts, own) if parts > 1 else dataset)
    if policy == "seed":
        agreed_seed = agree_on_seed(seed, parts, num_shards is not None)
        dataset = shuffled(dataset, require_buffer(buffer_size), agreed_seed, stream=own)
        return marked(dataset, *seed_mark(seed, agreed_seed))
    if policy == "off":
        return marked(dataset)
    return marked(deal(dataset, parts, own, even_steps), ONE_ORDER, *padded)


def require_buffer(buffer_size: Any) -> int:
    """Returns `buffer_size` as an int.

    Args:
        buffer_size: What the user gave.

    Raises:
        OptionError: if it is no number of elements.
    """
    size = whole_number("buffer_size", buffer_size)
    if size < 1:
        raise OptionError(explain("`buffer_size` is too small.", received=str(size), expected="1 or more"))
    return size


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
                '`dataset` cannot be divided by file (`policy="file"`).',
                received=str(error.message).splitlines()[0].rstrip("."),
                expected="a pipeline that reads TFRecords, lines or fixed-length records",
                do='Take policy="element", or tfdistkit.data.from_files.',
            )
        ) from error
    part = tf.data.experimental.from_variant(variant, dataset.element_spec)
    return part.with_options(dataset.options())


def _refuse_even_files(even_steps: str | None) -> None:
    if even_steps is not None:
        raise OptionError(
            explain(
                'Nobody knows how many elements the files hold, so `policy="file"` cannot make the parts even.',
                received=f"even_steps={even_steps!r}",
                do='Take policy="element"; or write the files with `tfdistkit data write`, which counts them, and '
                "read them with tfdistkit.data.from_files.",
            )
        )


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
    if has_mark(dataset, SHARDED):
        raise OptionError(
            explain(
                "`dataset` was sharded before, or a part of it was: this worker would get a part of its part.",
                received="the result of tfdistkit.data.shard",
                expected="one call of tfdistkit.data.shard for each pipeline",
                do="Remove the second call.",
            )
        )
