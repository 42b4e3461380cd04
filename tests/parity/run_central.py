"""Records where `central_storage` stores and computes, and its races: `python -m parity.run_central FOLDER`.

The variables live on CPU:0, where no replica computes; the replicas are on CPU:1 and CPU:2. Writes `seen.json`:
by part, what it returned, or its error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections import Counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context as tf_context

import tfdistkit
from parity import models
from parity.comparing import SMALLEST_SIZE
from parity.data import make_data
from parity.making import logical_cpus
from tfdistkit.strategies.central_storage import CentralVariable

HOME, WORKERS = "CPU:0", ["CPU:1", "CPU:2"]
RACES = 12
_WRAPPERS = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")


def _device(name: str) -> str:
    return tf.DeviceSpec.from_string(name).to_string().rpartition("device:")[2]


def _values(variables: Any) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(v) for v in variables if "seed" not in v.path]


def _far(expected: list[np.ndarray], found: list[np.ndarray]) -> float:
    """The largest difference of a tensor relative to its largest number."""
    assert len(expected) == len(found) and all(np.isfinite(f).all() for f in found)
    return max(
        float(np.max(np.abs(e - f))) / max(float(np.max(np.abs(e))), SMALLEST_SIZE) for e, f in zip(expected, found)
    )


def _many_slots(width: int) -> tuple[keras.Model, Any]:
    stack = layers.Dense(width), layers.BatchNormalization(), layers.Dropout(0.1), layers.Dense(1)
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, gradient_accumulation_steps=2)
    model = models.chain((10,), *stack)
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse", metrics=["mae"], jit_compile=False)
    return model, optimizer


def _live(width: int) -> dict[str, int]:
    """Counts the variables of the shape of the first kernel in this process, by device."""
    found = [v for v in gc.get_objects() if isinstance(v, tf.Variable) and v.shape == (10, width)]
    return Counter(_device(v.device) for v in found if not isinstance(v, tf.distribute.DistributedValues))


def stored(central: Any) -> Any:
    """Returns the devices of the variables of a trained model; for comparison, also those of `mirrored`."""
    x, y = make_data("numbers", 64)
    seen: dict[str, Any] = {"live": {}}
    mirrored = tfdistkit.strategy("mirrored", devices=WORKERS)
    for name, strategy, width in (("mirrored", mirrored, 43), ("central_storage", central, 41)):
        with strategy.scope():
            model, optimizer = _many_slots(width)
        model.fit(x, y, batch_size=32, epochs=2, verbose=0)
        seen["live"][name] = _live(width)
    for kind, variables in (("trainable", model.trainable_variables), ("optimizer", model.optimizer.variables)):
        seen[kind] = {v.path: [_device(one.device) for one in v.value.values] for v in variables}
    seen["state"] = {v.path: [_device(one.device) for one in v.value.values] for v in model.non_trainable_variables}
    seen["parameter_devices"] = list(central.extended.parameter_devices)
    return seen


def optimizers(central: Any) -> Any:
    """Returns for each Keras optimizer its variables that are not central; each list should be empty."""
    seen = {}
    for name, kind in sorted(vars(keras.optimizers).items()):
        if not isinstance(kind, type) or not issubclass(kind, keras.optimizers.Optimizer) or name in _WRAPPERS:
            continue
        with central.scope():
            model = models.chain((6,), layers.Dense(4))
            optimizer = kind()
            optimizer.build(model.trainable_variables)
        # Adafactor has scalars as placeholders for unused slots.
        seen[name] = [v.path for v in optimizer.variables if not isinstance(v.value, CentralVariable) and v.shape.rank]
    return seen


def computed(central: Any) -> Any:
    """Returns the devices of matrix products and updates in the graphs that TensorFlow ran."""
    x, y = make_data("numbers", 32)
    with central.scope():
        model, _ = _many_slots(8)
    tf_context.context().enable_run_metadata()
    try:
        model.fit(x, y, batch_size=32, verbose=0)
        graphs = tf_context.context().export_run_metadata().partition_graphs
    finally:
        tf_context.context().disable_run_metadata()
    nodes = [node for graph in graphs for node in graph.node]
    kinds = ("MatMul", "AssignSubVariable")
    return {kind: Counter(_device(node.device) for node in nodes if kind in node.op) for kind in kinds}


class WhereAmI(layers.Layer):
    """Records the devices of its inputs, in eager steps."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def call(self, inputs: Any) -> Any:
        if tf.executing_eagerly():
            self.devices.add(_device(inputs.device))
        return inputs


def computed_eagerly(central: Any) -> Any:
    """The devices of the outputs of a layer, in eager steps."""
    x, y = make_data("numbers", 32)
    where = WhereAmI()
    with central.scope():
        model = models.chain((10,), layers.Dense(4), where, layers.Dense(1))
        model.compile("adam", "mse", run_eagerly=True)
    where.devices.clear()
    model.fit(x, y, batch_size=32, verbose=0)
    return sorted(where.devices)


class LateDense(layers.Layer):
    """A Dense layer that reads its kernel late: after the number of loops in the last column."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(10, 10), name="kernel")

    def call(self, inputs: Any) -> Any:
        x, loops = inputs[:, :-1], tf.reduce_max(inputs[:, -1])
        start = tf.eye(64) + 0.0 * x[0, 0]
        spun = tf.while_loop(lambda i, a: i < loops, lambda i, a: (i + 1.0, tf.nn.softmax(a @ a)), [0.0, start])[1]
        with tf.control_dependencies([spun]):
            kernel = tf.convert_to_tensor(self.kernel.value)
        x = x + tf.where(spun[0, 0] > 2.0, 1.0, 0.0)  # Never; but TensorFlow cannot know it.
        return tf.concat([tf.tanh(x @ kernel), inputs[:, -1:]], 1)


class TwoUpdates(keras.Model):
    """Updates twice in a step, clips a weight, and logs the final weights."""

    def __init__(self) -> None:
        super().__init__()
        self.late = [LateDense() for _ in range(3)]
        self.out = layers.Dense(1)
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, inputs: Any) -> Any:
        for layer in self.late:
            inputs = layer(inputs)
        return self.out(inputs[:, :-1])

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        kernel = self.late[0].kernel
        kernel.assign(tf.clip_by_value(kernel, -0.3, 0.3))
        self.norm.update_state(tf.reduce_sum(tf.square(self.late[1].kernel)) + tf.reduce_sum(tf.abs(kernel)))
        return {"loss": loss, "norm": self.norm.result()}


def _trainings(strategy: Any, times: int) -> list[tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]]:
    """Trains on the same rows from the same initial weights with other delays; returns weights, slots and logs."""
    x, y = make_data("numbers", 8 * 24)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = TwoUpdates()
        optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, use_ema=True, ema_overwrite_frequency=5)
        model.compile(optimizer, "mse", steps_per_execution=4, jit_compile=False)
        model(tf.zeros((2, 11)))
        optimizer.build(model.trainable_variables)
    variables = [*model.weights, *optimizer.variables]
    start = _values(variables)
    results = []
    for seed in range(times):
        delays = np.random.RandomState(seed).choice([0.0, 0.0, 1.0, 5.0, 30.0], (len(x), 1))
        data = tf.data.Dataset.from_tensor_slices((np.concatenate([x, delays], 1).astype("float32"), y)).batch(8)
        for variable, value in zip(variables, start):
            variable.assign(value)
        history = model.fit(data, epochs=2, verbose=0).history
        logs = np.array([*history["loss"], *history["norm"]])
        results.append((_values(model.weights), _values(optimizer.variables), [logs]))
    return results


def races(central: Any) -> Any:
    """Many trainings in which different replicas read late: bitwise equal, and equal to one process."""
    (expected,) = _trainings(tf.distribute.get_strategy(), 1)
    start = time.monotonic()
    trained = _trainings(central, RACES)
    different = {b"".join(array.tobytes() for group in result for array in group) for result in trained}
    far = {name: _far(*pair) for name, *pair in zip(("weights", "slots", "logs"), expected, trained[0])}
    return {"different": len(different), "far": far, "seconds": round(time.monotonic() - start, 1)}


def written(central: Any) -> Any:
    """Replicas write different values to a variable, for each aggregation, in graphs and eagerly."""
    seen = {}
    for aggregation in ("NONE", "ONLY_FIRST_REPLICA", "SUM", "MEAN"):
        with central.scope():
            variable = tf.Variable(1.0, aggregation=tf.VariableAggregation[aggregation])

        def step(variable: Any = variable) -> Any:
            number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            variable.assign_add(10.0 * (number + 1.0))
            return variable.read_value()

        for name, run in (("graph", tf.function(central.run)), ("eager", central.run)):
            read = [float(v) for v in central.experimental_local_results(run(step))]
            seen[f"{aggregation} {name}"] = [*read, float(variable.numpy())]
    return seen


def inner(central: Any) -> Any:
    """An update in a branch, in a loop and in a tf.function inside of a step."""
    with central.scope():
        variable = tf.Variable(1.0)

    def in_branch() -> None:
        tf.cond(tf.random.uniform(()) < 2.0, lambda: variable.assign(2.0), lambda: variable.read_value())

    def in_loop() -> None:
        tf.while_loop(lambda i: i < 2, lambda i: [variable.assign(2.0), i + 1][1:], [0])

    assign = tf.function(lambda: variable.assign(2.0))

    def in_function() -> None:
        assign()

    seen = []
    for step in (in_branch, in_loop, in_function):
        try:
            tf.function(central.run)(step)
            seen.append("no error")
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    return {"errors": seen, "variable": float(variable.numpy())}


def saved(central: Any, folder: str) -> Any:
    """Saves; loads under `one_device` and under one computing device beside the variables', and trains on."""
    x, y = make_data("numbers", 64)
    with central.scope():
        model, _ = _many_slots(8)
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    path = os.path.join(folder, "model.keras")
    model.save(path)
    seen = {}
    for name, options in (("one_device", {}), ("central_storage", {"devices": "CPU:1", "parameter_device": "CPU:2"})):
        strategy = tfdistkit.strategy(name, **options)
        with strategy.scope():
            loaded = keras.models.load_model(path)
        pairs = [*zip(_values(model.weights), _values(loaded.weights))]
        pairs += zip(_values(model.optimizer.variables), _values(loaded.optimizer.variables))
        seen[name] = {
            "equal": len(pairs) > 20 and all(np.array_equal(a, b) for a, b in pairs),
            "predicts": _far([model.predict(x, verbose=0)], [loaded.predict(x, verbose=0)]),
            "devices": sorted({_device(v.value.device) for v in loaded.trainable_variables}),
            "loss": loaded.fit(x, y, batch_size=32, verbose=0).history["loss"][0],
        }
    return seen


def main(folder: str) -> None:
    """Runs all parts in one process."""
    logical_cpus(3)
    central = tfdistkit.strategy("central_storage", devices=WORKERS, parameter_device=HOME)
    parts = (stored, optimizers, computed, computed_eagerly, races, written, inner)
    seen: dict[str, Any] = {}
    for name, part in [*((p.__name__, p) for p in parts), ("saved", lambda strategy: saved(strategy, folder))]:
        try:
            seen[name] = part(central)
        except Exception:
            seen[name] = {"error": traceback.format_exc()[-4000:]}
        print(name, str(seen[name])[:3000], flush=True)
        with open(os.path.join(folder, "seen.json"), "w") as file:
            json.dump(seen, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
