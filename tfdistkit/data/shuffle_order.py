"""Shuffle orders that all ranks share: the same for any number of workers, and a new one in each epoch.

The seeds go into TensorFlow's operations unchanged. `Dataset.shuffle` would mix in the global seed
(`tf.random.set_seed`), so ranks with different global seeds would shard different orders.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.collectives import broadcast_object
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_integer

# Not 0: TensorFlow takes the pair (0, 0) for "no seed".
_SECOND_SEED = 1

# The index shuffle of TensorFlow uses 8 bits of each of 3 keys for up to 65,536 elements. Two passes have 2**48 orders,
# where one pass with one random key has 256. Four rounds are TensorFlow's own default.
_PASSES = 2
_ROUNDS = 4
_LARGEST_SEED = 2**31 - 1


def agree_on_seed(seed: Any, world_size: int, is_given_shard: bool) -> int:
    """Returns the seed of a shuffle order that all ranks share.

    Args:
        seed: The user's argument; None lets rank 0 draw one from TensorFlow's global generator: the same in every run
            after `keras.utils.set_random_seed`.
        world_size: The number of shards.
        is_given_shard: Whether the user gave `num_shards` and `index`, so that the ranks do not communicate.

    Raises:
        OptionError: if the seed is out of range, or missing where the ranks do not communicate.
        UnsupportedError: if there is no strategy yet to broadcast the seed with.
    """
    if seed is not None:
        return require_integer("seed", seed, at_least=0, at_most=_LARGEST_SEED)
    if is_given_shard and world_size > 1:
        raise OptionError(
            explain(
                "`seed` must be given together with `num_shards` and `index`: the workers do not agree on one.",
                received="seed=None",
                do="Pass the same integer for every shard, such as seed=7.",
            )
        )
    chosen = int(tf.random.uniform([], maxval=_LARGEST_SEED, dtype=tf.int64))
    return chosen if world_size == 1 else int(broadcast_object(chosen))


def epoch_seeds(seed: int, stream: int = 0) -> tf.data.Dataset:
    """Returns a dataset of one number, a new one in each epoch.

    Args:
        seed: From 0; equal seeds give equal numbers in each process.
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


def index_keys(epoch_seed: Any, stream: Any) -> tf.Tensor:
    """Returns the keys of `shuffled_index`, for one epoch.

    Args:
        epoch_seed: A scalar int64 tensor.
        stream: A number or a scalar int64 tensor; different streams give different orders.
    """
    seed = tf.stack([tf.cast(epoch_seed, tf.int64), tf.cast(stream, tf.int64)])
    return tf.random.stateless_uniform([_PASSES, 3], seed, minval=None, maxval=None, dtype=tf.int32)


def shuffled_index(index: Any, keys: tf.Tensor, count: int) -> Any:
    """Returns the element at a position of a shuffle order, without making the order.

    Args:
        index: The position, an int64 tensor from 0 to `count - 1`.
        keys: What `index_keys` returned.
        count: The number of elements.
    """
    last = tf.constant(count - 1, tf.int64)
    for key in tf.unstack(keys):
        index = tf.raw_ops.RandomIndexShuffle(index=index, seed=key, max_index=last, rounds=_ROUNDS)
    return index


def shuffled(
    dataset: tf.data.Dataset, buffer_size: int, seed: Any, stream: Any = 0, every_epoch_anew: bool = True
) -> tf.data.Dataset:
    """Shuffles as `Dataset.shuffle` does, independently of TensorFlow's global seed.

    Args:
        dataset: The dataset.
        buffer_size: Elements in the shuffle buffer.
        seed: From 0, a number or a scalar int64 tensor.
        stream: Different streams give different orders.
        every_epoch_anew: Whether each iteration has a new order.
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
    """Returns a random permutation of the numbers from 0 to `count - 1`.

    Args:
        count: The length.
        seed: A scalar int64 tensor.
    """
    keys = tf.random.stateless_uniform([count], tf.stack([seed, _SECOND_SEED]), None, None, tf.int64)
    return tf.argsort(keys, stable=True)
