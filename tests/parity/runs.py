"""Trains a case by `fit`, batch by batch, or in a custom loop, under a given strategy."""

from __future__ import annotations

import functools
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from parity import feeds, models, own_losses, own_metrics, own_state, own_steps
from parity.case import Call, Case

EPOCHS = 3


class Record:
    """Records the results of a case on one rank.

    Args:
        folder: Where it may leave files.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.values: dict[str, Any] = {}
        self.arrays: dict[str, np.ndarray] = {}

    def add_logs(self, name: str, logs: Any) -> None:
        """Records named numbers, or named lists of numbers."""
        self.values[name] = {key: np.asarray(value, "float64").tolist() for key, value in logs.items()}

    def add_weights(self, name: str, variables: Any) -> None:
        """Records variables, except states of random generators, which differ between replicas."""
        kept = [v for v in variables if "seed" not in v.path]
        self.values[f"{name}_paths"] = [v.path for v in kept]
        for number, variable in enumerate(kept):
            value = keras.ops.convert_to_numpy(variable)
            self.arrays[f"{name}.{number:03}"] = np.asarray(value, "float32" if "float" in str(value.dtype) else None)

    def add_arrays(self, name: str, values: Any) -> None:
        """Records nested arrays."""
        for number, value in enumerate(tf.nest.flatten(values)):
            self.arrays[f"{name}.{number:03}"] = np.asarray(value, "float32")


def make(value: Any) -> Any:
    """Makes the calls of the table, also nested ones."""
    if isinstance(value, Call):
        parts = value.path.split(".")
        home = next(
            (m for m in (models, own_losses, own_metrics, own_state, own_steps) if hasattr(m, value.path)), keras
        )
        found = functools.reduce(getattr, parts, home)
        return found(*make(value.args), **make(value.options))
    if isinstance(value, dict):
        return {name: make(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(make(part) for part in value)
    return value


def compiled(case: Case) -> keras.Model:
    """Makes the model of a case; called in the scope of the strategy."""
    model = make(case.model)
    metrics = make(case.metrics)
    options = {"jit_compile": False, **make(case.compile)}
    metrics = list(metrics) if isinstance(metrics, tuple) else metrics
    model.compile(optimizer=make(case.optimizer), loss=make(case.loss), metrics=metrics, **options)
    return model


def fit_only(case: Case, strategy: tf.distribute.Strategy, record: Record) -> keras.Model:
    """Trains by `fit`, and records the curve, the weights and the optimizer's state."""
    with strategy.scope():
        model = compiled(case)
    data = feeds.columns(case)
    history = model.fit(**feeds.fit_arguments(case, data), epochs=EPOCHS, verbose=0).history
    # TensorFlow may write in place to arrays that it shares with Python.
    for given, fresh in zip(tf.nest.flatten(data), tf.nest.flatten(feeds.columns(case))):
        assert np.array_equal(given, fresh), f"`fit` wrote into the caller's arrays: {(given != fresh).sum()} numbers"
    record.add_logs("history", history)
    record.add_weights("weights", model.weights)
    if model.optimizer is not None:
        record.add_weights("optimizer", model.optimizer.variables)
    return model


def fit(case: Case, strategy: tf.distribute.Strategy, record: Record) -> keras.Model:
    """As `fit_only`, then `evaluate` and `predict`."""
    model = fit_only(case, strategy, record)
    data = feeds.columns(case)
    record.add_logs("evaluate", model.evaluate(feeds.dataset(data, 32), verbose=0, return_dict=True))
    if case.feed.endswith("arrays"):
        record.add_arrays("predict", model.predict(data[0], batch_size=32, verbose=0))
    else:
        record.add_arrays("predict", model.predict(feeds.dataset(data[:1], 32), verbose=0))
    return model


class BatchLogs(keras.callbacks.Callback):
    """Records the logs of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, list[float]] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for name, value in logs.items():
            for number, one in enumerate(np.ravel(value)):
                self.logs.setdefault(f"{name} {number}", []).append(float(one))

    on_test_batch_end = on_train_batch_end


def fit_batches(case: Case, strategy: tf.distribute.Strategy, record: Record) -> None:
    """Trains and evaluates, and records the logs of every batch and the state of all metrics."""
    with strategy.scope():
        model = compiled(case)
    train, test = BatchLogs(), BatchLogs()
    data = feeds.columns(case)
    history = model.fit(**feeds.fit_arguments(case, data), epochs=2, verbose=0, callbacks=[train]).history
    record.add_logs("history", {name: [np.ravel(v) for v in values] for name, values in history.items()})
    record.add_logs("batches", train.logs)
    record.add_weights("weights", model.weights)
    record.add_weights("metrics", model.metrics_variables)
    data = tuple(data if len(data) > 2 else data[:2])
    results = model.evaluate(feeds.dataset(data, case.global_batch), verbose=0, return_dict=True, callbacks=[test])
    record.add_logs("evaluate", {name: np.ravel(value) for name, value in results.items()})
    record.add_logs("test_batches", test.logs)
    own = {m.name: m.result() for m in model.metrics if not isinstance(m.result(), dict)}
    record.add_logs("results", {name: [float(value), float(np.asarray(value))] for name, value in own.items()})
    record.add_logs("values", {v.path: np.ravel(v.value.numpy()) for v in model.metrics_variables})


def on_batch(case: Case, strategy: tf.distribute.Strategy, record: Record) -> None:
    """`train_on_batch`, `test_on_batch`, `predict_on_batch`: each rank passes the whole global batch."""
    with strategy.scope():
        model = compiled(case)
    logs: list[dict[str, float]] = []
    for _ in range(EPOCHS):
        for x, y in feeds.dataset(feeds.columns(case), case.global_batch).as_numpy_iterator():
            logs.append(model.train_on_batch(x, y, return_dict=True))
    record.add_logs("history", {name: [float(log[name]) for log in logs] for name in logs[0]})
    record.add_weights("weights", model.weights)
    model.reset_metrics()
    x, y = feeds.columns(case)
    record.add_logs("evaluate", model.test_on_batch(x[:31], y[:31], return_dict=True))
    record.add_arrays("predict", model.predict_on_batch(x[:31]))


def of_sizes(case: Case, strategy: tf.distribute.Strategy, record: Record) -> None:
    """Batches of several sizes, which TensorFlow knows when it traces the step: on batches, and without remainders."""
    with strategy.scope():
        model = compiled(case)
    data = feeds.columns(case)
    steps, end = [], 0
    for rows in (16, 15, 14, 16, 13, 1, 15):
        batch = keras.tree.map_structure(lambda v: v[end : end + rows], data)  # noqa: B023
        steps.append(model.train_on_batch(*batch, return_dict=True))
        end += rows
    logs = {name: [float(step[name]) for step in steps] for name in steps[0]}
    for rows in (15, 16):
        batches = tf.data.Dataset.from_tensor_slices(data).batch(rows, drop_remainder=True)
        results = model.fit(batches, verbose=0).history, model.evaluate(batches, verbose=0, return_dict=True)
        for kind, values in zip(("fit", "evaluate"), results):
            logs |= {f"{kind} {rows} {name}": np.ravel(value) for name, value in values.items()}
    record.add_logs("history", logs)
    record.add_weights("weights", model.weights)


def _loop(case: Case, strategy: tf.distribute.Strategy, record: Record, loss_of: Any) -> None:
    """The custom loop of https://www.tensorflow.org/tutorials/distribute/custom_training."""
    with strategy.scope():
        model, optimizer = make(case.model), make(case.optimizer)
    batches = feeds.dataset(feeds.columns(case), case.global_batch)
    batches = strategy.experimental_distribute_dataset(batches)

    def train_step(inputs: Any) -> Any:
        x, y = inputs
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    @tf.function
    def distributed_train_step(inputs: Any) -> Any:
        per_replica = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, per_replica, axis=None)

    losses = [float(distributed_train_step(inputs)) for _ in range(EPOCHS) for inputs in batches]
    record.add_logs("history", {"loss": losses})
    record.add_weights("weights", model.weights)
    record.add_weights("optimizer", optimizer.variables)


def loop_average_loss(case: Case, strategy: tf.distribute.Strategy, record: Record) -> None:
    """The loss of the tutorial: one for each row, divided by the global batch size."""
    per_row = keras.losses.MeanSquaredError(reduction=None)

    def loss_of(y: Any, predicted: Any) -> Any:
        return tf.nn.compute_average_loss(per_row(y, predicted), global_batch_size=case.global_batch)

    _loop(case, strategy, record, loss_of)


def loop_keras_loss(case: Case, strategy: tf.distribute.Strategy, record: Record) -> None:
    """An unscaled Keras loss; the replicas' losses are summed."""
    _loop(case, strategy, record, keras.losses.MeanSquaredError())


def save_and_resume(case: Case, strategy: tf.distribute.Strategy, record: Record) -> None:
    """Saves in both formats, loads both under the strategy, and trains each for an epoch."""
    trained = fit(case, strategy, record)
    whole, weights = os.path.join(record.folder, "model.keras"), os.path.join(record.folder, "model.weights.h5")
    trained.save(whole)
    trained.save_weights(weights)
    with strategy.scope():
        loaded = keras.models.load_model(whole, custom_objects={"SplitNormalization": models.SplitNormalization})
        other = compiled(case)
        other.optimizer.build(other.trainable_variables)
        other.load_weights(weights)
    record.add_weights("loaded_weights", loaded.weights)
    record.add_weights("loaded_optimizer", loaded.optimizer.variables)
    record.add_weights("other_weights", other.weights)
    record.add_weights("other_optimizer", other.optimizer.variables)
    for name, model in (("resumed", loaded), ("other_resumed", other)):
        record.add_logs(name, model.fit(**feeds.fit_arguments(case), verbose=0).history)
        record.add_weights(f"{name}_weights", model.weights)


RUNS = {
    run.__name__: run
    for run in (fit, fit_only, fit_batches, on_batch, of_sizes, loop_average_loss, loop_keras_loss, save_and_resume)
}
