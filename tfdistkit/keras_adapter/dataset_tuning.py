"""TensorFlow's tuning of a dataset, turned off where there is nothing to tune.

It looks at every dataset that is read, in a thread, after 10 ms, 20 ms, 40 ms and so on, up to a minute. Who lets go of
an iterator waits for that thread, which is woken before it is told that it may end, and now and then sleeps on: up to
a minute, in which the whole process stands still, and all ranks with it. With short epochs that was a half of the time
of `fit`; a fit of 100 ms was seen to take 130 s.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api


def without_idle_tuning(dataset: Any) -> Any:
    """Turns tuning off for a dataset in which nobody asked for it (`AUTOTUNE`), and that does not say itself.

    Arrays that are given to Keras are such: its one parallel function copies rows, as parallel as TensorFlow runs it
    untuned (16 calls, or as many as there are threads).

    Args:
        dataset: What is to be read.

    Returns:
        The dataset, with the option `autotune.enabled`, or as it was; so is what is no `tf.data.Dataset`.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    if dataset.options().autotune.enabled is not None or is_tuned(dataset):
        return dataset
    return without_tuning(dataset)


def without_tuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns tuning off for a dataset.

    Args:
        dataset: What is to be read.

    Returns:
        The dataset, with the option `autotune.enabled`.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def is_tuned(dataset: tf.data.Dataset) -> bool:
    """Whether something in a dataset has a parallelism that TensorFlow chooses, or may have.

    Args:
        dataset: The dataset.
    """
    waiting, seen = [dataset], {}
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one  # Kept, so that its id stays its own.
        functions = private_api.functions_of_dataset(one)
        kind = private_api.kind_of_dataset(one)
        if kind == "Variant" or any(_makes_datasets(private_api.graph_of(function)) for function in functions):
            return True
        is_of_keras = bool(functions) and all(map(private_api.is_of_keras_arrays, functions))
        if kind.startswith("Parallel") and not is_of_keras:
            if private_api.number_of_dataset(one, "_num_parallel_calls") in (None, tf.data.AUTOTUNE):
                return True
        waiting += private_api.inputs_of_dataset(one)
    return False


def _makes_datasets(graph: tf.Graph) -> bool:
    """Whether a function makes something parallel, as that of an `interleave` may."""
    return any("Parallel" in operation.type for operation in graph.get_operations())
