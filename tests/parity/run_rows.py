"""Runs minimal calls that show faults of stock Keras or TensorFlow, under one engine.

`python -m parity.run_rows ENGINE FOLDER ROW ...` writes `FOLDER/<row>.<rank>.json` after each row: what it
returned, or its error. Which row is which: docs/exactness.md.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from parity import models
from parity.data import make_data
from parity.making import make_strategy, own_rank

SUM = tf.distribute.ReduceOp.SUM


def _compiled(strategy: Any, model: Any = models.mlp, **options: Any) -> keras.Model:
    with strategy.scope():
        made = model()
        made.compile(**{"optimizer": "adam", "loss": "mse", **options})
    return made


def _batches(rows: int, batch: int, x: Any = None) -> tf.data.Dataset:
    if x is None:
        x, _ = make_data("numbers", rows)
    return tf.data.Dataset.from_tensor_slices(x).batch(batch)


def m1(strategy: Any) -> Any:
    """The simplest `fit`."""
    x, y = make_data("numbers", 64)
    return _compiled(strategy).fit(x, y, batch_size=32, verbose=0).history["loss"]


def m2(strategy: Any) -> Any:
    """Keras builds a model on the first batch, here of 7 rows (4 and 3)."""
    batch = next(iter(strategy.experimental_distribute_dataset(_batches(7, 32))))
    if not getattr(strategy, "is_tfdistkit_strategy", False):
        strategy.reduce("MEAN", batch, axis=None)
    x, y = make_data("numbers", 7)
    return _compiled(strategy).fit(x, y, batch_size=32, verbose=0).history["loss"]


def m3(strategy: Any) -> Any:
    """Keras reduces a scalar log along axis 0."""
    return float(strategy.reduce("MEAN", tf.constant(2.0 + own_rank()), axis=0))


def m5(strategy: Any) -> Any:
    """`steps_per_execution` > 1. For the stock strategy, M1 and M3 are fixed first, because they hide it."""
    trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
    patched = contextlib.ExitStack()
    model = _compiled(strategy, steps_per_execution=2)
    if not getattr(strategy, "is_tfdistkit_strategy", False):
        first_of_all = lambda values, strategy, reduction: keras.tree.map_structure(  # noqa: E731
            lambda v: strategy.experimental_local_results(v)[0], values
        )
        patched.enter_context(mock.patch.object(trainer, "reduce_per_replica", first_of_all))
        model._maybe_symbolic_build = lambda **unused: None
    x, y = make_data("numbers", 128)
    with patched:
        return model.fit(x, y, batch_size=32, verbose=0, shuffle=False).history["loss"]


def m6(strategy: Any) -> Any:
    """Predictions of a bfloat16 model are gathered."""
    return np.asarray(strategy.gather(tf.constant([own_rank()], tf.bfloat16), axis=0), "float32").tolist()


def _moving_mean(strategy: Any, rows: int) -> Any:
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 10))

    @tf.function
    def step(x: Any) -> Any:
        return strategy.run(lambda x: layer(x, training=True), args=(x,))

    for x in strategy.experimental_distribute_dataset(_batches(rows, 32)):
        step(x)
    return keras.ops.convert_to_numpy(layer.moving_mean).tolist()


def m7(strategy: Any) -> Any:
    """The moving mean of BatchNormalization on this rank."""
    return _moving_mean(strategy, 64)


def m8(strategy: Any) -> Any:
    """The same after a global batch of 1 row, which leaves one of two replicas empty."""
    return _moving_mean(strategy, 1)


def m9(strategy: Any) -> Any:
    """`jit_compile=True`, which asks XLA for collectives."""
    x, y = make_data("numbers", 64)
    return _compiled(strategy, jit_compile=True).fit(x, y, batch_size=32, verbose=0).history["loss"]


def k3(strategy: Any) -> Any:
    """A NaN in the gradient of the last replica's rows only, with loss scaling."""
    with strategy.scope():
        model = models.mlp()
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
        optimizer.build(model.trainable_variables)
    before = [keras.ops.convert_to_numpy(w) for w in model.weights]
    x, _ = make_data("numbers", 32)
    x[-1] = np.nan

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(tf.square(model(x))))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    run = tf.function(lambda x: strategy.run(step, args=(x,)))
    print("K3 starts its step", flush=True)
    for batch in strategy.experimental_distribute_dataset(_batches(32, 32, x)):
        run(batch)
    after = [keras.ops.convert_to_numpy(w) for w in model.weights]
    return {
        "skipped": all(np.array_equal(a, b) for a, b in zip(before, after)),
        "scale": float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)),
    }


def k4(strategy: Any) -> Any:
    """Python numbers of the optimizer's counter."""
    x, y = make_data("numbers", 64)
    model = _compiled(strategy)
    model.fit(x, y, batch_size=32, verbose=0)
    return [float(model.optimizer.iterations), int(model.optimizer.iterations)]


def k8(strategy: Any) -> Any:
    """`predict` with fewer rows than replicas."""
    x, _ = make_data("tokens", 1)
    model = _compiled(strategy, models.lstm)
    return list(model.predict(x, verbose=0).shape)


def k9(strategy: Any) -> Any:
    """Returns the values that Dropout keeps on each replica of this process."""
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=3)
    masks = tf.function(lambda: strategy.run(lambda: layer(tf.ones((100,)), training=True)))()
    return [np.asarray(mask).tolist() for mask in strategy.experimental_local_results(masks)]


def c1(strategy: Any) -> Any:
    """Returns the outcome of `fit` for each layer with state that the replicas write."""
    x, y = make_data("numbers", 64)
    seen = {}
    for name, options in (("BatchNormalization", {}), ("Dropout", {"rate": 0.5})):
        model = _compiled(strategy, lambda: models.mlp(getattr(keras.layers, name)(**options)))  # noqa: B023
        try:
            losses = model.fit(x, y, batch_size=32, epochs=2, verbose=0).history["loss"]
            seen[name] = "trained" if np.isfinite(losses).all() else str(losses)
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"[:1000]
    return seen


def c2(strategy: Any) -> Any:
    """Returns loss and accuracy of one Dense layer: from `evaluate`, and computed directly."""
    x, y = make_data("binary", 100)
    one_layer = lambda: models.chain((10,), keras.layers.Dense(1, activation="sigmoid"))  # noqa: E731
    model = _compiled(strategy, one_layer, loss="binary_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=20, verbose=0)
    found = model.evaluate(x, y, batch_size=20, verbose=0, return_dict=True)
    kernel, bias = (keras.ops.convert_to_numpy(w).astype("float64") for w in model.weights)
    p = 1.0 / (1.0 + np.exp(-(x @ kernel + bias)))
    loss = -np.mean(y * np.log(p) + (1.0 - y) * np.log(1.0 - p))
    return {"evaluate": found, "true": {"loss": float(loss), "accuracy": float(np.mean((p > 0.5) == y))}}


ROWS = {row.__name__: row for row in (m1, m2, m3, m5, m6, m7, m8, m9, k3, k4, k8, k9, c1, c2)}


def main(engine: str, folder: str, names: list[str]) -> None:
    """Runs rows one after the other; an error of TensorFlow may affect later rows."""
    strategy = make_strategy(engine)
    for name in names:
        keras.utils.set_random_seed(1)
        try:
            seen = {"value": ROWS[name](strategy)}
        except Exception as error:
            seen = {"error": f"{type(error).__name__}: {error}"[:3000]}
        with open(os.path.join(folder, f"{name}.{own_rank()}.json"), "w") as file:
            json.dump(seen, file)
        print(name, str(seen)[:300], flush=True)
    if engine == "stock_multiworker":
        os._exit(0)  # After a failed collective TensorFlow may wait for its peers at exit.


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
