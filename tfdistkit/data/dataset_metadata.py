"""Metadata of a pipeline: marks in its options, which every later transformation inherits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistkit.errors import OptionError, explain

# The dataset is this worker's shard: it must not be sharded again.
SHARDED = "tfdistkit.data.shard"
# Each element is this worker's rows of one global batch: it must not be split into steps.
ROWS_OF_BATCHES = "tfdistkit.data.rows_of_batches"
# In steps of a global batch, the shards of all workers together have the order of one process.
ONE_ORDER = "tfdistkit.data.one_order"
# The shards of all workers have the same number of elements, whatever that is.
EVEN = "tfdistkit.data.even"
# Prefixes of the seed of a shuffle order: one that the user gave, one that rank 0 chose.
GIVEN_SEED, CHOSEN_SEED = "tfdistkit.data.given_seed:", "tfdistkit.data.chosen_seed:"
# Some rows are padding, with a sample weight of -0.0 (see `padding`).
PADDED = "tfdistkit.data.padded"
# Prefix of the name of a tensor that every replica gets whole.
_SAME_FOR_ALL_ROWS = "tfdistkit.data.same_for_all_rows:"


def marked(dataset: tf.data.Dataset, *marks: str) -> tf.data.Dataset:
    """Marks a dataset as sharded, and turns TensorFlow's auto-sharding off for it.

    Args:
        dataset: The dataset.
        *marks: Further marks.
    """
    options = tf.data.Options()
    options.framework_type = [SHARDED, *marks]  # added to earlier marks
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def even_marks(even_steps: str | None, parts: int) -> list[str]:
    """Returns the marks of a shard for its remainder.

    Args:
        even_steps: How the remainder is handled, as in `tfdistkit.data.shard`.
        parts: The number of shards.
    """
    if even_steps is None or parts == 1:
        return []
    return [EVEN, PADDED] if even_steps == "pad" else [EVEN]


def same_for_all_rows(dataset: tf.data.Dataset, *names: str) -> tf.data.Dataset:
    """Names tensors that every replica gets whole, because their first dimension is not the batch.

    Examples are a table of weights or an adjacency matrix. All other tensors are split among the replicas along
    their first dimension.

    Args:
        dataset: A dataset of global batches whose elements are dictionaries, tuples or both.
        *names: Paths to tensors: keys of dictionaries and positions in tuples, joined by `/` (`"0/adjacency"`). A
            single key or position names every tensor that has it in its path.

    Returns:
        The dataset, with a mark that later transformations keep.

    Raises:
        OptionError: if a name matches no tensor of the elements.
    """
    paths = paths_of(dataset.element_spec)
    for name in names:
        if not any(_is_named(path, name) for path in paths):
            raise OptionError(
                explain(
                    "`names` must be paths to tensors of the dataset's elements.",
                    received=repr(name),
                    expected=f"keys or positions from: {', '.join('/'.join(path) for path in paths)}",
                )
            )
    return with_mark(dataset, *(f"{_SAME_FOR_ALL_ROWS}{name}" for name in names))


def with_mark(dataset: tf.data.Dataset, *marks: str) -> tf.data.Dataset:
    """Adds marks to a dataset.

    Args:
        dataset: The dataset.
        *marks: The marks.
    """
    options = tf.data.Options()
    options.framework_type = list(marks)  # added to earlier marks
    return dataset.with_options(options)


def paths_of(structure: Any) -> list[list[str]]:
    """Returns the keys that lead to each tensor of a structure, in the order of `tf.nest.flatten`.

    Args:
        structure: Nested dictionaries, tuples and lists.
    """
    if isinstance(structure, Mapping):
        parts = [(str(key), structure[key]) for key in sorted(structure)]
    elif isinstance(structure, (tuple, list)):
        names = getattr(structure, "_fields", range(len(structure)))
        parts = [(str(name), part) for name, part in zip(names, structure)]
    else:
        return [[] for _ in tf.nest.flatten(structure)]
    return [[name, *path] for name, part in parts for path in paths_of(part)]


def is_same_for_all_rows(path: list[str], marks: list[str]) -> bool:
    """Returns whether a tensor was named in `same_for_all_rows`.

    Args:
        path: The keys that lead to the tensor.
        marks: The marks of its dataset.
    """
    names = [mark.removeprefix(_SAME_FOR_ALL_ROWS) for mark in marks if mark.startswith(_SAME_FOR_ALL_ROWS)]
    return any(_is_named(path, name) for name in names)


def _is_named(path: list[str], name: str) -> bool:
    return name in path if "/" not in name else name == "/".join(path)


def seed_mark(given: int | None, agreed: int | None) -> list[str]:
    """Returns the mark of a shuffle order; an empty list without shuffling.

    Args:
        given: The seed that the user gave, or None.
        agreed: The seed that all ranks use; None without shuffling.
    """
    if agreed is None:
        return []
    return [f"{CHOSEN_SEED if given is None else GIVEN_SEED}{agreed}"]


def marks_of(dataset: tf.data.Dataset) -> list[str]:
    """Returns the marks of a dataset and of its inputs."""
    return [str(mark) for mark in dataset.options().framework_type or ()]


def has_mark(dataset: tf.data.Dataset, mark: str) -> bool:
    """Returns whether a dataset or one of its inputs has a mark.

    Args:
        dataset: The dataset.
        mark: The mark.
    """
    return mark in marks_of(dataset)
