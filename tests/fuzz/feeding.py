"""The data of a program, in the form that Keras receives; the same on every rank and in every process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from fuzz.programs import Program

WORDS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen")
TOKENS = 5
KINDS_OF_TOKENS = 9
CLASSES = 3
CLASS_WEIGHTS = {0: 0.5, 1: 2.0, 2: 0.0}

Random = np.random.RandomState


def _numbers(random: Random, rows: int) -> Any:
    return random.randn(rows, 4)


def _images(random: Random, rows: int) -> Any:
    return random.randn(rows, 4, 4, 2)


def _tokens(random: Random, rows: int) -> Any:
    """Sequences of 1 to 5 tokens, padded with zeros, of uneven lengths."""
    x = random.randint(1, KINDS_OF_TOKENS, (rows, TOKENS)).astype("int32")
    lengths = random.randint(1, TOKENS + 1, rows)
    x[np.arange(TOKENS)[None] >= lengths[:, None]] = 0
    return x


def _words(random: Random, rows: int) -> Any:
    return np.array(WORDS, object)[random.randint(0, len(WORDS), (rows, 1))]


def _named(random: Random, rows: int) -> Any:
    return {"a": random.randn(rows, 2), "b": random.randn(rows, 3)}


def _nested(random: Random, rows: int) -> Any:
    return {"left": (random.randn(rows, 2), random.randn(rows, 1)), "right": random.randn(rows, 2)}


INPUTS = {
    "numbers": _numbers,
    "images": _images,
    "tokens": _tokens,
    "ragged": _tokens,
    "words": _words,
    "named": _named,
    "nested": _nested,
}


def _number(random: Random, rows: int) -> Any:
    return 0.5 + random.randn(rows, 1)


TARGETS = {
    "number": _number,
    "flat": lambda random, rows: _number(random, rows)[:, 0],
    "yes_no": lambda random, rows: random.randint(0, 2, (rows, 1)).astype("float64"),
    "class": lambda random, rows: random.randint(0, CLASSES, (rows,)).astype("int32"),
    "tokens": lambda random, rows: 0.5 + random.randn(rows, TOKENS, 1),
    "two": lambda random, rows: {"one": _number(random, rows), "two": np.sin(random.randn(rows, 2))},
    "none": lambda random, rows: None,
}


def _row_weights(program: Program, random: Random, rows: int, y: Any) -> Any:
    weights = 0.1 + random.rand(rows)
    if program.weights == "zeros":
        weights = weights * random.randint(0, 2, rows)
    if program.weights == "tokens":
        weights = weights[:, None] * random.rand(rows, TOKENS)
    if program.weights == "outputs":
        return {"one": weights, "two": weights[::-1].copy()}
    return weights


def columns(program: Program, rows: int = 0, more_seed: int = 0) -> tuple[Any, ...]:
    """Returns inputs, and targets and weights if the program has them, in the float type of Keras.

    Args:
        program: The program.
        rows: Other than those of the program.
        more_seed: Another one gives other rows.
    """
    random, rows = Random(program.seed + 1000 * more_seed), rows or program.rows
    x = INPUTS[program.inputs](random, rows)
    y = TARGETS[program.targets](random, rows)
    data = (x,) if y is None else (x, y)
    if y is not None and program.weights not in ("", "classes"):
        data = (x, y, _row_weights(program, random, rows, y))

    def as_keras_has_it(value: Any) -> Any:
        return value.astype(keras.config.floatx()) if value.dtype.kind == "f" else value

    return tf.nest.map_structure(as_keras_has_it, data)


def take(values: Any, start: int, stop: int) -> Any:
    """Returns rows `start` to `stop` of nested arrays."""
    return tf.nest.map_structure(lambda value: value[start:stop], values)


def _rows_of(program: Program, data: tuple[Any, ...]) -> tf.data.Dataset:
    if program.inputs == "ragged":
        data = (tf.RaggedTensor.from_tensor(data[0], padding=0), *data[1:])
    return tf.data.Dataset.from_tensor_slices(data if len(data) > 1 else data[0])


def dataset(program: Program, data: tuple[Any, ...], shuffled: bool = False, dropped: bool = False) -> tf.data.Dataset:
    """Returns batches as a dataset."""
    rows = _rows_of(program, data)
    if shuffled:
        rows = rows.shuffle(5, seed=program.seed)
    return rows.batch(program.batch, drop_remainder=dropped)


class Batches(keras.utils.PyDataset):
    """The batches of nested arrays, by number."""

    def __init__(self, data: tuple[Any, ...], batch: int):
        super().__init__()
        self.data, self.batch = data, batch

    def __len__(self) -> int:
        return -(-len(tf.nest.flatten(self.data)[0]) // self.batch)

    def __getitem__(self, index: int) -> Any:
        return take(self.data, index * self.batch, (index + 1) * self.batch)


def batches(program: Program, data: tuple[Any, ...]) -> Iterator[Any]:
    """Yields the batches of nested arrays, in their order."""
    for start in range(0, len(tf.nest.flatten(data)[0]), program.batch):
        yield take(data, start, start + program.batch)


def steps_in(program: Program) -> int:
    """Returns the number of batches of the program's data."""
    whole = program.rows // program.batch
    return whole if program.feed == "dropped_dataset" else -(-program.rows // program.batch)


def _arrays(program: Program, data: tuple[Any, ...], shuffle: bool) -> dict[str, Any]:
    named = dict(zip(("x", "y", "sample_weight"), data))  # Some of them are optional.
    return {**named, "batch_size": program.batch, "shuffle": shuffle}


def _generator(program: Program, data: tuple[Any, ...]) -> dict[str, Any]:
    def forever() -> Iterator[Any]:
        while True:
            yield from batches(program, data)

    return {"x": forever(), "steps_per_epoch": program.steps_per_epoch or steps_in(program)}


def _repeated(program: Program, data: tuple[Any, ...]) -> dict[str, Any]:
    steps = program.steps_per_epoch or steps_in(program)
    return {"x": dataset(program, data, shuffled=True).repeat(), "steps_per_epoch": steps}


def _rows_repeated(program: Program, data: tuple[Any, ...]) -> dict[str, Any]:
    """One batch holds the last rows of a pass and the first rows of the next."""
    steps = program.steps_per_epoch or steps_in(program)
    return {"x": _rows_of(program, data).repeat().batch(program.batch), "steps_per_epoch": steps}


FEEDS = {
    "arrays": lambda program, data: _arrays(program, data, False),
    "shuffled_arrays": lambda program, data: _arrays(program, data, True),
    "dataset": lambda program, data: {"x": dataset(program, data)},
    "shuffled_dataset": lambda program, data: {"x": dataset(program, data, shuffled=True)},
    "dropped_dataset": lambda program, data: {"x": dataset(program, data, dropped=True)},
    "repeated_dataset": _repeated,
    "rows_repeated": _rows_repeated,
    "generator": _generator,
    "pydataset": lambda program, data: {"x": Batches(data, program.batch), "shuffle": False},
    "shuffled_pydataset": lambda program, data: {"x": Batches(data, program.batch), "shuffle": True},
}
ARRAYS = ("arrays", "shuffled_arrays")


def fit_arguments(program: Program) -> dict[str, Any]:
    """Returns the arguments of `fit`: data, validation data, other options."""
    arguments = {**FEEDS[program.feed](program, columns(program)), "epochs": program.epochs, "verbose": 0}
    if program.steps_per_epoch and program.feed in ARRAYS:
        arguments["steps_per_epoch"] = program.steps_per_epoch
    if program.weights == "classes":
        arguments["class_weight"] = CLASS_WEIGHTS
    held_out = columns(program, rows=max(1, program.rows - 3), more_seed=1)
    if program.validation == "split":
        arguments["validation_split"] = 0.4
    elif program.validation == "arrays":
        arguments["validation_data"] = held_out if len(held_out) > 1 else (*held_out, None)
        arguments["validation_batch_size"] = program.batch
    elif program.validation == "dataset":
        arguments["validation_data"] = dataset(program, held_out)
    return arguments


def evaluate_arguments(program: Program) -> dict[str, Any]:
    """Returns the arguments of `evaluate`: other rows than for `fit`."""
    data = columns(program, rows=program.rows + 1, more_seed=2)
    if program.feed in ARRAYS:
        arguments = _arrays(program, data, False)
        del arguments["shuffle"]
        return arguments
    if program.feed.endswith("pydataset"):
        return {"x": Batches(data, program.batch)}
    if program.feed == "generator":
        return {"x": batches(program, data), "steps": -(-(program.rows + 1) // program.batch)}
    return {"x": dataset(program, data)}


def predict_arguments(program: Program) -> dict[str, Any]:
    """Returns the arguments of `predict`: the inputs of `evaluate`."""
    data = columns(program, rows=program.rows + 1, more_seed=2)[:1]
    if program.feed in ARRAYS:
        return {"x": data[0], "batch_size": program.batch}
    return {"x": dataset(program, data)}
