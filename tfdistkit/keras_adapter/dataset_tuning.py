"""Turns tf.data's autotuning off for datasets that have nothing to tune.

Autotuning polls every dataset in a thread, after 10 ms, 20 ms, 40 ms and so on, up to a minute. Releasing an iterator
joins that thread. TensorFlow wakes the thread before it sets the flag to stop, so the thread sometimes sleeps again,
for up to a minute, and blocks the process and all of its peers. With short epochs this took half of the time of `fit`;
a fit of 100 ms took up to 130 s.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_datasets


def without_idle_tuning(dataset: Any) -> Any:
    """Turns autotuning off for a dataset without `AUTOTUNE`, unless its options set autotuning.

    This includes Keras's datasets of arrays: their one parallel function copies rows, and untuned it runs in parallel
    too (16 calls, or the number of threads).

    Args:
        dataset: A dataset, or another kind of data.

    Returns:
        The dataset with the option `autotune.enabled`, or the argument unchanged.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    if dataset.options().autotune.enabled is not None or is_tuned(dataset):
        return dataset
    return without_tuning(dataset)


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns autotuning off for a dataset.

    Args:
        dataset: The dataset.

    Returns:
        The dataset, with the option `autotune.enabled`.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def of_device(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of the dataset that hands a device its elements, one for each device and epoch: it has nothing to tune.

    Options of the dataset behind it do not reach it. With 8 devices, such threads stopped a short `fit` for minutes.
    """
    return without_tuning(original(*args, **kwargs))


def is_tuned(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset has, or may have, a transformation whose parallelism TensorFlow chooses.

    Args:
        dataset: The dataset.
    """
    pending, visited = [dataset], {}
    while pending:
        one = pending.pop()
        if id(one) in visited:
            continue
        visited[id(one)] = one  # A reference, so that its id is not reused.
        functions = private_datasets.functions_of_dataset(one)
        kind = private_datasets.kind_of_dataset(one)
        if kind == "Variant" or any(_makes_datasets(private_datasets.graph_of(function)) for function in functions):
            return True
        is_of_keras = bool(functions) and all(map(private_datasets.is_of_keras_arrays, functions))
        if kind.startswith("Parallel") and not is_of_keras:
            if private_datasets.number_of_dataset(one, "_num_parallel_calls") in (None, tf.data.AUTOTUNE):
                return True
        pending += private_datasets.inputs_of_dataset(one)
    return False


def _makes_datasets(graph: tf.Graph) -> bool:
    """Returns whether a function creates parallel transformations, as the function of an `interleave` may."""
    return any("Parallel" in operation.type for operation in graph.get_operations())
