"""Converts the data of a case to the input of `fit`: arrays, datasets, generators, PyDatasets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity.case import Case
from parity.data import make_data, take

CLASS_WEIGHTS = {0: 0.5, 1: 2.0}


def columns(case: Case, rows: int | None = None, seed: int = 0) -> tuple[Any, ...]:
    """Returns inputs, targets and, if the case has them, sample weights."""
    rows = rows or case.rows
    x, y = make_data(case.data, rows, seed)
    if case.weights != "sample":
        return x, y
    shape = (rows, 7) if case.data == "padded" else (rows,)
    return x, y, np.random.RandomState(5 + seed).rand(*shape).astype("float32")


def dataset(data: tuple[Any, ...], batch: int) -> tf.data.Dataset:
    """Yields batches of nested arrays in order."""
    return tf.data.Dataset.from_tensor_slices(data).batch(batch)


def _batches(data: tuple[Any, ...], batch: int) -> Iterator[Any]:
    rows = len(tf.nest.flatten(data)[0])
    for start in range(0, rows, batch):
        yield take(data, start, start + batch)


class Batches(keras.utils.PyDataset):
    """The batches of nested arrays, by number."""

    def __init__(self, data: tuple[Any, ...], batch: int):
        super().__init__()
        self.data, self.batch = data, batch

    def __len__(self) -> int:
        return -(-len(tf.nest.flatten(self.data)[0]) // self.batch)

    def __getitem__(self, index: int) -> Any:
        return take(self.data, index * self.batch, (index + 1) * self.batch)


def _arrays(data: tuple[Any, ...], batch: int, shuffle: bool) -> dict[str, Any]:
    names = dict(zip(("x", "y", "sample_weight"), data))  # Weights are optional.
    return {**names, "batch_size": batch, "shuffle": shuffle}


def _generator(data: tuple[Any, ...], batch: int) -> dict[str, Any]:
    def forever() -> Iterator[Any]:
        while True:
            yield from _batches(data, batch)

    return {"x": forever(), "steps_per_epoch": -(-len(tf.nest.flatten(data)[0]) // batch)}


FEEDS = {
    "dataset": lambda data, batch: {"x": dataset(data, batch)},
    "repeated_dataset": lambda data, batch: {"x": dataset(data, batch).repeat()},
    "arrays": lambda data, batch: _arrays(data, batch, False),
    "shuffled_arrays": lambda data, batch: _arrays(data, batch, True),
    "generator": _generator,
    "pydataset": lambda data, batch: {"x": Batches(data, batch), "shuffle": False},
    "shuffled_pydataset": lambda data, batch: {"x": Batches(data, batch), "shuffle": True},
}


def fit_arguments(case: Case, data: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """Returns the arguments of `fit` for a case: data, validation data, other options."""
    arguments = {**FEEDS[case.feed](data or columns(case), case.global_batch), **case.fit}
    if case.weights == "class":
        arguments["class_weight"] = CLASS_WEIGHTS
    if case.validation:
        held_out = columns(case, rows=75, seed=7)
        arguments["validation_data"] = held_out
        if case.validation == "dataset":
            arguments["validation_data"] = dataset(held_out, case.global_batch)
    return arguments
