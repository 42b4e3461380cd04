"""The losses of several outputs in the logs are those of one process, whichever batches come in which order."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistkit

pytestmark = pytest.mark.tensorflow


def _model() -> keras.Model:
    inputs = keras.Input((3,), name="x")
    one, two = (keras.layers.Dense(1, name=name, kernel_initializer="ones")(inputs) for name in ("one", "two"))
    model = keras.Model(inputs, [one, two])
    model.compile(keras.optimizers.SGD(0.01), loss=["mse", "mae"])
    return model


def _data(*rows: int) -> tf.data.Dataset:
    random = np.random.default_rng(sum(rows))
    batches = [random.normal(size=(n, 5)).astype("float32") * (i + 1) for i, n in enumerate(rows)]
    x, y = (tf.TensorSpec([None, n], tf.float32) for n in (3, 1))
    dataset = tf.data.Dataset.from_generator(
        lambda: ((b[:, :3], (b[:, 3:4], b[:, 4:])) for b in batches), output_signature=(x, (y, y))
    )
    # Where it is unknown, Keras 3.15 counts the end of the data as one more batch of these losses.
    return dataset.apply(tf.data.experimental.assert_cardinality(len(rows)))


def _fit(model: keras.Model, *rows: int, **options: Any) -> list[dict[str, Any]]:
    return [model.fit(_data(*rows), epochs=2, verbose=0, **options).history]


def _validated(model: keras.Model) -> list[dict[str, Any]]:
    logs = _fit(model, 6, 6, 2, validation_data=_data(3, 4, 3))
    return [*logs, model.evaluate(_data(4, 4, 3), verbose=0, return_dict=True)]


def _fit_again(model: keras.Model) -> list[dict[str, Any]]:
    first = _fit(model, 6, 6, 2)
    return [*first, *_fit(model, 2, 5, 6)]


def _with_backups(model: keras.Model, *first: int) -> list[dict[str, Any]]:
    logs = _fit(model, *first) if first else []
    with tempfile.TemporaryDirectory() as folder:
        logs += _fit(model, 6, 6, 2, callbacks=[tfdistkit.callbacks.BackupAndResume(folder)])
    return [*logs, *_fit(model, 6, 6, 2)]


def _on_batches(model: keras.Model) -> list[dict[str, Any]]:
    return [model.train_on_batch(x, y, return_dict=True) for x, y in _data(4, 4, 3, 4)]


@pytest.mark.parametrize(
    "training",
    [
        lambda model: _fit(model, 6, 6, 2),
        lambda model: _fit(model, 2, 6, 6, 2),
        _validated,
        _fit_again,
        _with_backups,
        lambda model: _with_backups(model, 6, 6, 2),
        _on_batches,
    ],
    ids=["short_last", "short_first", "validated", "fit_again", "backup_first", "backup_later", "on_batches"],
)
def test_are_those_of_plain_keras(training: Callable[[keras.Model], list[dict[str, Any]]]) -> None:
    found = []
    for scope in (contextlib.nullcontext(), tfdistkit.strategy("one_device").scope()):
        with scope:
            model = _model()
        found.append(training(model))
    for plain, ours in zip(*found):
        assert {"one_loss", "two_loss"} <= plain.keys() == ours.keys()
        for name, curve in plain.items():
            np.testing.assert_allclose(ours[name], curve, rtol=1e-5, err_msg=name)
