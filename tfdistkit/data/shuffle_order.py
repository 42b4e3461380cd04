"""Orders that all ranks agree on: the same for any number of workers, and another one in each epoch.

The seeds go into TensorFlow's own operations as they are. `Dataset.shuffle` would mix the global seed
(`tf.random.set_seed`) into them, and ranks that set different ones would deal from different orders.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.collectives import broadcast_object
from tfdistkit.data.shard_spec import whole_number
from tfdistkit.errors import OptionError, explain

# What TensorFlow's pairs of seeds hold (0, 0) for: "take any".
_SECOND_SEED = 1
_LARGEST_SEED = 2**31 - 1


def agree_on_seed(seed: Any, world_size: int, is_given_place: bool) -> int:
    """Returns the seed of an order that all ranks share.

    Args:
        seed: What the user said; None lets rank 0 choose, by TensorFlow's global generator: the same in every run
            after `keras.utils.set_random_seed`.
        world_size: How many parts the data has.
        is_given_place: Whether the user gave `num_shards` and `index`, and the ranks know nothing of each other.

    Raises:
        OptionError: if the seed is wrong, or missing where nobody can be asked.
        UnsupportedError: if there is no strategy yet, and so no way to the other ranks.
    """
    if seed is not None:
        seed = whole_number("seed", seed)
        if not 0 <= seed <= _LARGEST_SEED:
            raise OptionError(explain("`seed` is out of range.", received=str(seed), expected=f"0 to {_LARGEST_SEED}"))
        return seed
    if is_given_place and world_size > 1:
        raise OptionError(
            explain(
                "`seed` is missing: with `num_shards` and `index` the workers do not ask each other for one.",
                expected="the same whole number for every part",
            )
        )
    chosen = int(tf.random.uniform([], maxval=_LARGEST_SEED, dtype=tf.int64))
    return chosen if world_size == 1 else int(broadcast_object(chosen))


def epoch_seeds(seed: int, stream: int = 0) -> tf.data.Dataset:
    """Returns a dataset of one number, another one in each epoch.

    Args:
        seed: From 0; it gives the same numbers in each process.
        stream: Different streams give different numbers.
    """
    variant = tf.raw_ops.RandomDatasetV2(
        seed=tf.constant(seed, tf.int64),
        seed2=tf.constant(_SECOND_SEED + stream, tf.int64),
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        rerandomize_each_iteration=True,
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.int64)).take(1)


def shuffled(
    dataset: tf.data.Dataset, buffer_size: int, seed: Any, stream: Any = 0, every_epoch_anew: bool = True
) -> tf.data.Dataset:
    """Shuffles as `Dataset.shuffle` does, whatever the global seed of TensorFlow.

    Args:
        dataset: What to shuffle.
        buffer_size: Elements that are held in memory to choose from.
        seed: From 0, a number or a scalar int64 tensor.
        stream: Different streams give different orders.
        every_epoch_anew: Whether each iteration has another order.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    dense = [isinstance(spec, tf.TensorSpec) for spec in specs]
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(dataset),
        buffer_size=tf.constant(buffer_size, tf.int64),
        seed=tf.cast(seed, tf.int64),
        seed2=tf.cast(stream, tf.int64) + _SECOND_SEED,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=every_epoch_anew,
        output_types=[spec.dtype if is_dense else tf.variant for spec, is_dense in zip(specs, dense)],
        output_shapes=[spec.shape if is_dense else tf.TensorShape(None) for spec, is_dense in zip(specs, dense)],
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec).with_options(dataset.options())


def permutation(count: int, seed: Any) -> tf.Tensor:
    """Returns the numbers from 0 to `count - 1` in some order.

    Args:
        count: How many.
        seed: A scalar int64 tensor.
    """
    keys = tf.random.stateless_uniform([count], tf.stack([seed, _SECOND_SEED]), None, None, tf.int64)
    return tf.argsort(keys, stable=True)
