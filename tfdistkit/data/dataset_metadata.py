"""What a pipeline says of itself: notes in its options, which every later transformation inherits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistkit.errors import OptionError, explain

# This worker's part of the data: it must not get a part of its part.
SHARDED = "tfdistkit.data.shard"
# Each element is this worker's rows of one global batch: nobody cuts it into steps any more.
ROWS_OF_BATCHES = "tfdistkit.data.rows_of_batches"
# The parts of all workers, in steps of a global batch each, are those of one process, in its order.
ONE_ORDER = "tfdistkit.data.one_order"
# Before the seed of a shuffled order, whether the user gave it or it was chosen.
GIVEN_SEED, CHOSEN_SEED = "tfdistkit.data.given_seed:", "tfdistkit.data.chosen_seed:"
# There are rows of padding in it, with a sample weight of -0.0 (see `padding`).
PADDED = "tfdistkit.data.padded"
# Before the name of a tensor that all replicas see whole.
_SAME_FOR_ALL_ROWS = "tfdistkit.data.same_for_all_rows:"


def marked(dataset: tf.data.Dataset, *marks: str) -> tf.data.Dataset:
    """Returns a dataset that carries marks, and that TensorFlow does not split by worker.

    Args:
        dataset: The dataset.
        *marks: What to say of it.
    """
    options = tf.data.Options()
    options.framework_type = [SHARDED, *marks]  # added to what is there
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


def same_for_all_rows(dataset: tf.data.Dataset, *names: str) -> tf.data.Dataset:
    """Names tensors of a batch that have no rows: every replica gets all of them.

    For what belongs to a batch as a whole, such as a table of weights or an adjacency matrix. All other tensors are
    cut into one part for each replica, along their first dimension.

    Args:
        dataset: A dataset of global batches whose elements are dictionaries, tuples or both.
        *names: Keys of dictionaries, or numbers of places in tuples (`"0"`), from the outside in with `/` between them
            (`"0/adjacency"`); a single one names every tensor that has it in its path.

    Returns:
        The dataset, with a mark that later transformations keep.

    Raises:
        OptionError: if the elements have no tensor of such a name.
    """
    paths = paths_of(dataset.element_spec)
    for name in names:
        if not any(_is_named(path, name) for path in paths):
            raise OptionError(
                explain(
                    "`names` must name tensors of the dataset's elements.",
                    received=repr(name),
                    expected=f"one of: {', '.join('/'.join(path) for path in paths)}",
                )
            )
    return with_mark(dataset, *(f"{_SAME_FOR_ALL_ROWS}{name}" for name in names))


def with_mark(dataset: tf.data.Dataset, *marks: str) -> tf.data.Dataset:
    """Returns a dataset that carries marks besides those that it has.

    Args:
        dataset: The dataset.
        *marks: What to say of it.
    """
    options = tf.data.Options()
    options.framework_type = list(marks)  # added to what is there
    return dataset.with_options(options)


def paths_of(structure: Any) -> list[list[str]]:
    """Returns the keys that lead to each tensor of a structure, in the order of `tf.nest.flatten`.

    Args:
        structure: Dictionaries, tuples and lists of anything.
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
    """Whether a tensor was named in `same_for_all_rows`.

    Args:
        path: The keys that lead to it.
        marks: The marks of its dataset.
    """
    names = [mark.removeprefix(_SAME_FOR_ALL_ROWS) for mark in marks if mark.startswith(_SAME_FOR_ALL_ROWS)]
    return any(_is_named(path, name) for name in names)


def _is_named(path: list[str], name: str) -> bool:
    return name in path if "/" not in name else name == "/".join(path)


def seed_mark(given: int | None, agreed: int | None) -> list[str]:
    """Returns the mark of a shuffled order; none where nothing is shuffled.

    Args:
        given: The seed that the user gave.
        agreed: The seed of the order.
    """
    if agreed is None:
        return []
    return [f"{CHOSEN_SEED if given is None else GIVEN_SEED}{agreed}"]


def marks_of(dataset: tf.data.Dataset) -> list[str]:
    """Returns the marks of a dataset, and of what it was made of."""
    return [str(mark) for mark in dataset.options().framework_type or ()]


def has_mark(dataset: tf.data.Dataset, mark: str) -> bool:
    """Whether a dataset, or something that it was made of, was marked.

    Args:
        dataset: The dataset.
        mark: The mark.
    """
    return mark in marks_of(dataset)
