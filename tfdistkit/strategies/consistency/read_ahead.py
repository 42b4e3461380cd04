"""Reads the batches of the next step out of an iterator, and gives them back in another one."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api


def read_ahead(strategy: Any, iterator: Any, batches: int) -> tuple[Any, list[list[Any]]]:
    """Reads batches that the next step takes.

    Args:
        strategy: The strategy.
        iterator: A `tf.data.Iterator`, or a `tf.distribute.DistributedIterator`.
        batches: How many batches to read; there may be fewer.

    Returns:
        An iterator of the same kind over these batches, for which a tf.function is not traced again; the given one if
        there are none. And the batches: the element of each replica of this process.
    """
    devices = len(strategy.extended.worker_devices)
    read: list[list[Any]] = []
    for _ in range(batches):
        element = iterator.get_next_as_optional()
        if not bool(element.has_value()):
            break
        value = element.get_value()
        read.append([private_api.select_replica(i, value) for i in range(devices)])
    if not read:
        return iterator, read
    elements = [tf.data.Dataset.from_tensors(one) for batch in read for one in batch]
    joined = functools.reduce(lambda a, b: a.concatenate(b), elements)
    spec = private_api.local_spec(iterator.element_spec)
    dataset = tf.data.experimental.from_variant(tf.data.experimental.to_variant(joined), spec)
    options = tf.data.Options()
    options.autotune.enabled = False  # Its thread would delay the end of the epoch.
    options.experimental_optimization.apply_default_optimizations = False  # They take longer than the elements.
    dataset = dataset.with_options(options)
    if isinstance(iterator, tf.distribute.DistributedIterator):
        return iter(strategy.distribute_datasets_from_function(lambda _: dataset)), read
    return iter(dataset), read
