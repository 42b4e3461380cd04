"""Runs batches that do not divide evenly among four replicas: `python -m parity.run_uneven FOLDER`.

Writes `seen.json`: by part, what it returned, or its error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdistkit

REPLICAS = 4
IMAGES = np.random.default_rng(0).random((13, 6, 6, 2)).astype("float32")
TARGETS = IMAGES.mean((1, 2, 3))[:, None]


class RowsSeen(layers.Layer):
    """Records the number of rows of each replica, and returns its inputs."""

    seen: list[int] = []

    def call(self, inputs: Any) -> Any:
        def note(rows: Any) -> None:
            RowsSeen.seen.append(int(rows))

        with tf.control_dependencies([tf.py_function(note, [tf.shape(inputs)[0]], [])]):
            return tf.identity(inputs)


def _model(*first: layers.Layer) -> keras.Model:
    keras.utils.set_random_seed(3)
    stack = layers.Conv2D(3, 3), layers.GlobalAveragePooling2D(), layers.Dense(1)
    model = keras.Sequential([keras.Input((6, 6, 2)), *first, *stack])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"], jit_compile=False)
    return model


def _numbers(model: keras.Model) -> dict[str, Any]:
    """Trains, evaluates and predicts in every way, on batches of 5, 3 and 1 rows."""
    numbers: dict[str, Any] = {}
    for rows in (5, 3, 1):
        data = (IMAGES[: 2 * rows + 1], TARGETS[: 2 * rows + 1])  # The last batch has one row.
        history = model.fit(*data, batch_size=rows, epochs=2, shuffle=False, verbose=0).history
        numbers[f"fit {rows}"] = list(history.values())
        numbers[f"evaluate {rows}"] = model.evaluate(*data, batch_size=rows, verbose=0)
        numbers[f"predict {rows}"] = model.predict(data[0], batch_size=rows, verbose=0).tolist()
        numbers[f"on_batch {rows}"] = model.train_on_batch(data[0][:rows], data[1][:rows])
        numbers[f"test_on_batch {rows}"] = model.test_on_batch(data[0][:rows], data[1][:rows])
        numbers[f"predict_on_batch {rows}"] = model.predict_on_batch(data[0][:rows]).tolist()
    numbers["weights"] = [w.tolist() for w in model.get_weights()]
    return numbers


def equal(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Compares one process with four replicas, in float64: in float32 small losses are only rounding."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        expected = _numbers(_model())
        with strategy.scope():
            model = _model()
        return {"one": expected, "four": _numbers(model)}
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


def parts(strategy: tf.distribute.Strategy) -> list[int]:
    """Returns the rows of each replica, for a batch of 10 and for one of 5."""
    with strategy.scope():
        model = _model(RowsSeen())
    for rows in (10, 5):
        model.fit(IMAGES[:rows], TARGETS[:rows], batch_size=rows, verbose=0)
    return RowsSeen.seen


def _graphs(edges: int | None) -> tf.data.Dataset:
    """Batches of 4 nodes and 20 edges."""

    def batches() -> Iterator[Any]:
        for _ in range(3):
            yield {"nodes": np.ones((4, 2), "float32"), "edges": np.ones((20, 2), "float32")}, np.ones((4, 1))

    rows = None if edges is None else 4
    spec = {"nodes": tf.TensorSpec((rows, 2)), "edges": tf.TensorSpec((edges, 2))}, tf.TensorSpec((rows, 1))
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


class OfGraphs(keras.Model):
    """Each node sees the sum of all edges."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.out(inputs["nodes"] + ops.sum(inputs["edges"], axis=0, keepdims=True))


def graphs(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Errors for batches whose tensors have different rows, and results where the rows are named."""
    found: dict[str, Any] = {}
    with strategy.scope():
        model = OfGraphs()
        model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    for name, edges in (("known", 20), ("unknown", None)):
        try:
            model.fit(_graphs(edges), verbose=0)
        except tfdistkit.errors.OptionError as error:
            found[name] = str(error)
    try:
        model.train_on_batch(*next(iter(_graphs(None))))
    except tfdistkit.errors.OptionError as error:
        found["on_batch"] = str(error)
    dataset = tfdistkit.data.same_for_all_rows(_graphs(None), "edges")
    found["named"] = model.fit(dataset, verbose=0).history["loss"]
    alone = OfGraphs()
    alone.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    found["alone"] = alone.fit(_graphs(None), verbose=0).history["loss"]
    return found


def arguments(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """A custom loop that passes a vector of seeds to its replicas before the batch."""
    with strategy.scope():
        loss_function = keras.losses.MeanSquaredError()

    @tf.function
    def step(seeds: Any, batch: Any) -> Any:
        def replica(seeds: Any, x: Any, y: Any) -> Any:
            return loss_function(y, x) + 0.0 * tf.reduce_sum(seeds)

        return strategy.reduce("SUM", strategy.run(replica, args=(seeds, *batch)), axis=None)

    x, y = TARGETS[:10], TARGETS[:10] ** 2
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(10))
    seen = [float(step(tf.zeros([7]), batch)) for batch in batches]
    return {"seen": seen, "expected": [float(np.mean((x - y) ** 2))]}


def ragged(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """`train_on_batch` with ragged rows and a number, under a custom step."""

    class OfWords(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = layers.Embedding(9, 2, embeddings_initializer="ones")

        def call(self, inputs: Any) -> Any:
            return tf.reduce_sum(tf.ragged.map_flat_values(self.table, inputs), axis=(1, 2))[:, None]

        def train_step(self, data: Any) -> Any:
            x, y, weight = data
            with tf.GradientTape() as tape:
                loss = weight * ops.mean(ops.square(y - self(x)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    def trained() -> Any:
        model = OfWords()
        model.compile(keras.optimizers.SGD(0.01), jit_compile=False)
        x = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7]])
        losses = [model.train_on_batch(x, TARGETS[:5], tf.constant(0.5), return_dict=True)["loss"] for _ in range(3)]
        return [*map(float, losses), *map(float, keras.ops.convert_to_numpy(model.weights[0]).ravel())]

    expected = trained()
    with strategy.scope():
        return {"four": trained(), "one": expected}


PARTS = {part.__name__: part for part in (equal, parts, graphs, arguments, ragged)}


def main(folder: str) -> None:
    """Runs all parts."""
    keras.config.disable_traceback_filtering()
    strategy = tfdistkit.strategy("mirrored", devices=REPLICAS)
    seen: dict[str, Any] = {}
    for name, part in PARTS.items():
        try:
            seen[name] = part(strategy)
        except Exception:
            seen[name] = {"error": traceback.format_exc()[-4000:]}
    with open(os.path.join(folder, "seen.json"), "w") as file:
        json.dump(seen, file, default=np.ndarray.tolist)  # Keras 3.10 returns arrays on a batch.


if __name__ == "__main__":
    main(sys.argv[1])
