"""What a pipeline says of itself: notes in its options, which every later transformation inherits."""

from __future__ import annotations

import tensorflow as tf

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
