"""Repeatable orders of data resume; others are refused before the first step."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupted_runs import Data, arrays, assert_same, light, no_callbacks, refused, run

pytestmark = pytest.mark.tensorflow


def rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays())


def sampled() -> tf.data.Dataset:
    return tf.data.Dataset.sample_from_datasets([rows(), rows()])


def chosen() -> tf.data.Dataset:
    choice = tf.data.Dataset.random(rerandomize_each_iteration=True).map(lambda i: i % 2)
    return tf.data.Dataset.choose_from_datasets([rows(), rows()], choice)


UNREPEATABLE: dict[str, tuple[Callable[[], tf.data.Dataset], str]] = {
    "interleave": (lambda: tf.data.Dataset.range(2).interleave(lambda i: rows().shuffle(9)), "`shuffle`"),
    "sample_from_datasets": (sampled, "without a seed"),
    "choose_from_datasets": (chosen, "without a seed"),
    "deterministic": (lambda: rows().map(lambda x, y: (x, y), 2, deterministic=False), "`deterministic=False`"),
    "filter": (lambda: rows().filter(lambda x, y: tf.random.uniform([]) < 0.5), "in the function of `filter`"),
    "random": (lambda: tf.data.Dataset.random().take(9).map(lambda i: (tf.zeros([4]), [0.0])), "`random`"),
}


@pytest.mark.parametrize("name", list(UNREPEATABLE))
def test_an_unrepeatable_order_is_found_everywhere(tmp_path: pathlib.Path, name: str) -> None:
    make, text = UNREPEATABLE[name]
    tf.random.set_seed(None)
    message = refused(tmp_path, lambda: {"x": make().batch(4)}, seed=None)
    assert "must have an order that a new process can repeat" in message and text in message, message


def shared(reshuffles: bool | None) -> Data:
    data = rows().shuffle(22, seed=1, reshuffle_each_iteration=reshuffles)
    return {"x": data.skip(6).batch(4), "validation_data": data.take(6).batch(6)}


def test_a_shuffle_of_training_and_validation_is_refused(tmp_path: pathlib.Path) -> None:
    message = refused(tmp_path, lambda: shared(None))
    assert "must not share a `shuffle`" in message and "reshuffle_each_iteration=False" in message
    one = rows().shuffle(22, seed=1).batch(4)

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(one, verbose=0)

    with pytest.raises(Exception, match="must not share a `shuffle`"):
        run(light, lambda: {"x": one}, lambda: [Evaluates()], tmp_path)
    assert run(light, lambda: shared(None), no_callbacks, tmp_path / "accepted", same_order=False) is not None


def twice() -> Data:
    data = rows().shuffle(22, seed=3)
    return {"x": data.concatenate(data).batch(4)}


def in_a_function() -> Data:
    data = rows().shuffle(22, seed=3)
    return {"x": tf.data.Dataset.range(2).flat_map(lambda i: data).batch(4)}


def from_two() -> Data:
    sources = [rows().shuffle(22), rows().shuffle(22)]
    return {"x": tf.data.Dataset.sample_from_datasets(sources, seed=3, rerandomize_each_iteration=True).batch(4)}


ORDERS: dict[str, Callable[[], Data]] = {
    "split once": lambda: shared(False),
    "split before": lambda: {"x": rows().skip(6).shuffle(22).batch(4), "validation_data": rows().take(6).batch(6)},
    "repeated": lambda: {"x": rows().shuffle(22).repeat(2).batch(4)},
    "cached": lambda: {"x": rows().shuffle(22).cache().batch(4)},
    "twice": twice,
    "in a function": in_a_function,
    "in interleave": lambda: {"x": tf.data.Dataset.range(2).interleave(lambda i: rows().shuffle(9)).batch(4)},
    "filter": lambda: {"x": rows().filter(lambda x, y: tf.random.uniform([]) < 0.7).batch(4)},
    "from two": from_two,
}


@pytest.mark.parametrize("name", list(ORDERS))
def test_repeatable_orders_are_repeated(tmp_path: pathlib.Path, name: str) -> None:
    """Also if an epoch draws more than one order from a `shuffle`."""
    seen: list[np.ndarray] = []

    class Rows(keras.Model):
        def train_step(self, data: Any) -> Any:
            seen.append(data[0][:, 0].numpy())
            return super().train_step(data)

    def make() -> keras.Model:
        inputs = keras.Input((4,))
        model = Rows(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=True)
        return model

    expected = run(make, ORDERS[name], no_callbacks, None)
    assert expected is not None
    all_rows = list(seen)
    seen.clear()
    epoch = len(all_rows) // 3
    assert run(make, ORDERS[name], no_callbacks, tmp_path, 2 * epoch + 2) is None
    seen.clear()
    found = run(make, ORDERS[name], no_callbacks, tmp_path)
    assert found is not None
    for a, b in zip(seen, all_rows[2 * epoch + 1 :], strict=True):
        np.testing.assert_array_equal(a, b)
    assert_same(found, expected)
