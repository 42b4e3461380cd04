"""TensorFlow autotunes only datasets with `AUTOTUNE`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow


def double(value: Any) -> Any:
    """A function to run in parallel."""
    return value * 2


UNTUNED: dict[str, Callable[[Any], Any]] = {
    "arrays": lambda tf: tf.data.Dataset.from_tensor_slices([1, 2, 3]).batch(2),
    "a function": lambda tf: tf.data.Dataset.range(5).map(double).shuffle(3).batch(2).prefetch(tf.data.AUTOTUNE),
    "as many calls as the user says": lambda tf: tf.data.Dataset.range(5).map(double, num_parallel_calls=2).batch(2),
    "an interleave": lambda tf: tf.data.Dataset.range(2).interleave(lambda i: tf.data.Dataset.range(i)).batch(2),
}
TUNED: dict[str, Callable[[Any], Any]] = {
    "a function": lambda tf: tf.data.Dataset.range(5).map(double, num_parallel_calls=tf.data.AUTOTUNE).batch(2),
    "in zip": lambda tf: tf.data.Dataset.zip(tf.data.Dataset.range(5), TUNED["a function"](tf)).prefetch(1),
    "batches": lambda tf: tf.data.Dataset.range(5).batch(2, num_parallel_calls=tf.data.AUTOTUNE).map(double),
    "an interleave": lambda tf: tf.data.Dataset.range(2).interleave(
        lambda i: tf.data.Dataset.range(3), num_parallel_calls=tf.data.AUTOTUNE
    ),
    "inside of a flat_map": lambda tf: tf.data.Dataset.range(2).flat_map(
        lambda i: tf.data.Dataset.range(3).map(double, num_parallel_calls=tf.data.AUTOTUNE)
    ),
    "what nobody knows": lambda tf: tf.data.experimental.from_variant(
        tf.data.experimental.to_variant(TUNED["a function"](tf)), tf.TensorSpec([None], tf.int64)
    ),
}


def numbers(tf: Any, dataset: Any) -> list[float]:
    """Returns all elements of a dataset, sorted."""
    return sorted(float(n) for one in dataset for part in tf.nest.flatten(one) for n in tf.reshape(part, [-1]).numpy())


def is_turned_off(made: Callable[[Any], Any]) -> bool:
    import tensorflow as tf

    from tfdistkit.keras_adapter import dataset_tuning

    dataset = made(tf)
    found = dataset_tuning.without_idle_tuning(dataset)
    elements, expected = (numbers(tf, one) for one in (found, dataset))
    assert elements == expected and len(elements) > 0
    return found.options().autotune.enabled is False


@pytest.mark.parametrize("what", UNTUNED)
def test_autotuning_is_off_if_nothing_is_tunable(what: str) -> None:
    assert is_turned_off(UNTUNED[what])


@pytest.mark.parametrize("what", TUNED)
def test_autotuning_stays_on_if_something_is_tunable(what: str) -> None:
    assert not is_turned_off(TUNED[what])


def test_other_kinds_of_data_stay_unchanged() -> None:
    from tfdistkit.keras_adapter import dataset_tuning

    generator = object()
    assert dataset_tuning.without_idle_tuning(generator) is generator


def test_options_of_the_user_stay() -> None:
    import tensorflow as tf

    from tfdistkit.keras_adapter import dataset_tuning

    options = tf.data.Options()
    options.autotune.enabled = True
    tuned = UNTUNED["arrays"](tf).with_options(options)
    assert dataset_tuning.without_idle_tuning(tuned).options().autotune.enabled is True


def test_arrays_in_keras_are_not_tuned() -> None:
    import numpy as np
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    for shuffle in (True, False):
        given = ArrayDataAdapter(np.ones((5, 2)), np.ones((5, 1)), batch_size=2, shuffle=shuffle)
        assert is_turned_off(lambda tf, given=given: given.get_tf_dataset())


def test_data_of_fit_is_not_tuned_in_one_process() -> None:
    import tensorflow as tf

    import tfdistkit

    strategy = tfdistkit.strategy("one_device")
    read = strategy.distribute_keras_batches(UNTUNED["arrays"](tf))
    assert read.options().autotune.enabled is False
    read = strategy.distribute_keras_batches(TUNED["a function"](tf))
    assert read.options().autotune.enabled is not False


def test_datasets_of_devices_are_not_tuned() -> None:
    """One for each device and epoch: TensorFlow stops their threads in up to a minute."""
    import subprocess
    import sys

    program = """
import tfdistkit
strategy = tfdistkit.strategy("mirrored", devices=2)
import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops as devices
made, original = [], devices._create_device_dataset
devices._create_device_dataset = lambda *args: made.append(original(*args)) or made[-1]
assert len(list(strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4)))) == 2
print([one.options().autotune.enabled for one in made])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout.splitlines()[-1] == "[False, False]", ended.stderr
