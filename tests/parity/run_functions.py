"""Runs custom steps - methods, nested functions, loops - under one engine.

`python -m parity.run_functions ENGINE FOLDER` writes `FOLDER/<part>.<rank>.json` after each part: null, or its error.
A part that hangs ends the process with the stacks of all threads.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import gc
import json
import os
import pickle
import sys
import traceback
import weakref
from typing import Any

import keras
import numpy as np
import scipy.sparse
import tensorflow as tf

import tfdistkit
from parity.data import make_data
from parity.making import make_strategy, own_rank
from tfdistkit.errors import UnsupportedError
from tfdistkit.strategies.sync import collective_timeout

# Longer than the time of all parts on a busy machine.
_DEADLINE_S = 900

ONE = np.array([1.0, 2.0], "float32")


def _local(strategy: Any, value: Any) -> list[Any]:
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)]


def _expect(strategy: Any, value: Any, expected: Any) -> None:
    found = _local(strategy, value)
    assert all(v == expected for v in found), (found, expected)


def _by_replica(strategy: Any, value_of: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(lambda c: value_of(int(c.replica_id_in_sync_group)))


def _sum(value: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce("SUM", value)


class Trainer:
    """A class with its step in a tf.function, as in TensorFlow's guides."""

    factor = 2.0

    @tf.function
    def step(self, x: Any) -> Any:
        """A method that needs AutoGraph, and the object."""
        if tf.reduce_sum(x) > 0.0:
            result = tf.reduce_sum(x) * self.factor
        else:
            result = tf.reduce_sum(x)
        return result

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def signed(self, x: Any) -> Any:
        """A method with an input signature."""
        return tf.reduce_sum(x) * self.factor

    @tf.function(reduce_retracing=True, autograph=False)
    def options(self, x: Any, *, times: float = 1.0) -> Any:
        """A method with options, and a keyword."""
        return self.factor * times * tf.reduce_sum(x)

    @tf.function
    def nested(self, x: Any) -> Any:
        """A method that calls another one."""
        return self.step(x) + self.signed(x)

    @classmethod
    @tf.function
    def of_class(cls, x: Any) -> Any:
        """A class method."""
        return tf.reduce_sum(x) * cls.factor

    @staticmethod
    @tf.function
    def of_none(x: Any) -> Any:
        """A static method."""
        return tf.reduce_sum(x) if tf.reduce_sum(x) > 0.0 else tf.zeros([])

    @tf.function
    def __call__(self, x: Any) -> Any:
        if tf.reduce_sum(x) > 0.0:
            return self.factor * tf.reduce_sum(x)
        return tf.reduce_sum(x)


class Module(tf.Module):
    """TensorFlow wraps the methods of a module once more."""

    @tf.function
    def step(self, x: Any) -> Any:
        """A method that needs AutoGraph."""
        if tf.reduce_sum(x) > 0.0:
            return 2.0 * tf.reduce_sum(x)
        return tf.reduce_sum(x)


def methods(strategy: Any) -> None:
    """`strategy.run(self.step)` with a tf.function, and the object afterwards."""
    trainer, module = Trainer(), Module()
    one = tf.constant(ONE)
    run = functools.partial(strategy.run, args=(one,))
    for _ in range(2):
        _expect(strategy, run(trainer.step), 6.0)
        _expect(strategy, trainer.step(one), 6.0)
        _expect(strategy, run(trainer.signed), 6.0)
        _expect(strategy, run(trainer.options, kwargs={"times": 2.0}), 12.0)
        _expect(strategy, run(trainer.nested), 12.0)
        _expect(strategy, run(trainer.of_class), 6.0)
        _expect(strategy, run(trainer.of_none), 3.0)
        _expect(strategy, run(trainer), 6.0)
        _expect(strategy, run(trainer.__call__), 6.0)
        _expect(strategy, run(module.step), 6.0)
        _expect(strategy, run(lambda x: trainer.step(x)), 6.0)
        _expect(strategy, strategy.run(functools.partial(trainer.step, one)), 6.0)
        _expect(strategy, tf.function(functools.partial(strategy.run, trainer.step))((one,)), 6.0)
        # With the state from the programs above, outside of any strategy.
        _expect(strategy, [trainer.nested(-one), trainer(-one), module.step(one)], [-9.0, -3.0, 6.0])
        assert float(trainer.of_none(one)) == 3.0


def called_before(strategy: Any) -> None:
    """A tf.function that was called before it was given to `strategy.run`."""
    trainer, one = Trainer(), tf.constant(ONE)
    _expect(strategy, trainer.step(one), 6.0)
    _expect(strategy, strategy.run(trainer.step, args=(one,)), 6.0)
    _expect(strategy, strategy.run(trainer.step, args=(tf.ones(3),)), 6.0)


def freed(strategy: Any) -> None:
    """Functions given to `strategy.run` are freed."""
    trainer = Trainer()
    strategy.run(trainer.step, args=(tf.constant(ONE),))
    reference = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert reference() is None


def copies(strategy: Any) -> None:
    """Copies of objects with a strategy share it; a pickle raises an error of ours."""

    class Holder(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.held = {"strategy": strategy}

    assert copy.copy(strategy) is strategy
    assert copy.deepcopy(Holder()).held["strategy"] is strategy
    try:
        pickle.dumps(strategy)
    except tfdistkit.errors.UnsupportedError as error:
        assert "cannot be pickled" in str(error)
    else:
        raise AssertionError("pickled")


def same_object(strategy: Any) -> None:
    """Replicas sum the same tensor, eagerly and in a graph: it counts once for each replica."""
    replicas = strategy.num_replicas_in_sync
    dense, sparse = tf.constant([0.25]), tf.IndexedSlices(tf.constant([[0.25]]), tf.constant([1]), tf.constant([2, 1]))
    for gradient, shape in ((dense, (1,)), (sparse, (2, 1))):
        for eager in (True, False):
            with strategy.scope():
                variable = keras.Variable(np.ones(shape, "float32"))
                optimizer = keras.optimizers.SGD(1.0)
                optimizer.build([variable])

            def step() -> None:
                optimizer.apply([gradient], [variable])  # noqa: B023

            run = functools.partial(strategy.run, step)
            (run if eager else tf.function(run))()
            found = keras.ops.convert_to_numpy(variable).ravel()[-1]
            assert found == 1 - 0.25 * replicas, (found, shape, eager)
    _expect(strategy, strategy.reduce("SUM", strategy.run(lambda: dense), axis=None), [0.25 * replicas])
    if len(strategy.extended.worker_devices) > 1:
        with strategy.scope():
            summed = tf.Variable([0.0], aggregation=tf.VariableAggregation.SUM)
        strategy.run(lambda: summed.assign_add(dense))
        _expect(strategy, summed, [0.25 * replicas])


def sparse_input(strategy: Any) -> None:
    """`fit` on a scipy matrix equals `fit` on its dense values."""
    x, y = make_data("numbers", 22)
    x[x < 0.3] = 0.0
    seen = []
    for matrix in (x, scipy.sparse.csr_matrix(x), scipy.sparse.csr_matrix(x.astype("float64"))):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((x.shape[1],)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        losses = model.fit(matrix, y, batch_size=8, verbose=0, shuffle=False, validation_data=(matrix, y)).history
        seen.append([*losses["loss"], *losses["val_loss"], *model.predict(matrix, verbose=0).ravel().tolist()])
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-5)
    np.testing.assert_allclose(seen[2], seen[0], rtol=1e-5)


def other_strategies(strategy: Any) -> None:
    """Strategies on the same devices of one process, also TensorFlow's, do not interfere."""
    if len(strategy.extended.worker_devices) == 1:
        return
    devices = list(strategy.extended.worker_devices)
    others = [tf.distribute.MirroredStrategy(devices), tfdistkit.strategy("mirrored", devices=devices)]
    for elements, one in enumerate([strategy, *others, strategy], start=3):

        @tf.function
        def run(one: Any = one, elements: int = elements) -> Any:
            return one.run(lambda elements: _sum(tf.ones(elements)), args=(elements,))

        for _ in range(2):
            _expect(one, run(), [2.0] * elements)


def _train(strategy: Any, eagerly: bool, in_function: bool) -> list[Any]:
    """Trains twice, compiled again in between; with the layer and the loss in tf.functions, or without."""
    function = tf.function if in_function else lambda f: f
    loss = keras.losses.MeanSquaredError()
    loss_in_function = function(lambda y, p: loss(y, p))

    class Normalization(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.BatchNormalization(momentum=0.5)
            self.compute = function(lambda x, training: self.inner(x, training=training))

        def build(self, shape: Any) -> None:
            self.inner.build(shape)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.compute(x, training)

    keras.utils.set_random_seed(0)
    x, y = make_data("numbers", 22)
    with strategy.scope():
        layer = Normalization()
        model = keras.Sequential([keras.Input((x.shape[1],)), layer, keras.layers.Dense(1)])
    seen = []
    for _ in range(2):
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), lambda y, p: loss_in_function(y, p), run_eagerly=eagerly)
        seen += model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"]
        local = _local(strategy, layer.inner.moving_mean.value)
        assert all(v == local[0] for v in local), local
        seen += local[0]
    return seen + [float(w) for weight in model.get_weights() for w in weight.ravel()]


def functions_in_steps(strategy: Any) -> None:
    """Losses and layers in the user's tf.functions, in steps that are retraced, and in eager steps."""
    for eagerly in (False, True):
        expected = _train(strategy, eagerly, False)
        np.testing.assert_allclose(_train(strategy, eagerly, True), expected, rtol=1e-5, atol=1e-6)


def functions_in_loops(strategy: Any) -> None:
    """The same loss in custom loops: nested functions, and steps that are traced twice."""
    x, y = make_data("numbers", 22)
    plain = keras.losses.MeanSquaredError()
    inner = tf.function(lambda y, p: plain(y, p))
    seen = []
    for loss in (plain, inner, tf.function(lambda y, p: inner(y, p))):
        for eagerly in (False, True):
            keras.utils.set_random_seed(0)
            with strategy.scope():
                layer = keras.layers.Dense(1)
                layer.build(x.shape)
                optimizer = keras.optimizers.SGD(0.1)
                optimizer.build(layer.trainable_variables)

            def step(batch: Any, loss: Any = loss, layer: Any = layer, optimizer: Any = optimizer) -> Any:
                with tf.GradientTape() as tape:
                    value = loss(batch[1], layer(batch[0]))
                gradients = tape.gradient(value, layer.trainable_variables)
                optimizer.apply(gradients, layer.trainable_variables)
                return value

            losses = []
            for _ in range(2):
                run = functools.partial(strategy.run, step)
                run = run if eagerly else tf.function(run)
                for batch in strategy.distribute_batches(tf.data.Dataset.from_tensor_slices((x, y)).batch(8)):
                    losses.append(float(strategy.reduce("SUM", run((batch,)), axis=None)))
            seen.append(losses)
    for losses in seen:
        np.testing.assert_allclose(losses, seen[0], rtol=1e-5)


def loops(strategy: Any) -> None:
    """A sum over the replicas in a loop of the step, or in a function of an eager step: correct, or an error."""
    replicas = strategy.num_replicas_in_sync
    several = len(strategy.extended.worker_devices) > 1

    def in_loop(x: Any) -> Any:
        total = tf.zeros([])
        for _ in tf.range(3):
            total += _sum(x)
        return total

    def in_python_loop(x: Any) -> Any:
        return sum(_sum(x) for _ in range(3))

    def around(x: Any) -> Any:
        total = tf.zeros([])
        for _ in tf.range(3):
            total += strategy.experimental_local_results(strategy.run(_sum, args=(x,)))[0]
        return total

    one = tf.constant(1.0)
    _expect(strategy, tf.function(functools.partial(strategy.run, in_python_loop))((one,)), 3.0 * replicas)
    _expect(strategy, tf.function(around)(one), 3.0 * replicas)
    in_function = tf.function(lambda x: _sum(x))
    runs = {
        "loop": lambda: tf.function(functools.partial(strategy.run, in_loop))((one,)),
        "function": lambda: strategy.run(lambda x: 3.0 * in_function(x), args=(one,)),
    }
    for name, run in runs.items():
        try:
            found = run()
        except UnsupportedError as error:
            assert several and "strategy.run" in str(error), (name, error)
        else:
            assert not several, name
            _expect(strategy, found, 3.0 * replicas)


def branches(strategy: Any) -> None:
    """A sum in a branch: correct if all replicas take the branch, an error if only some do."""
    collective_timeout._BRANCH_TIMEOUT_S = 3.0
    replicas = strategy.num_replicas_in_sync

    def step(condition: Any, x: Any) -> Any:
        if condition:
            x = _sum(x)
        return x

    @tf.function
    def run(conditions: Any) -> Any:
        return strategy.run(step, args=(conditions, 1.0))

    _expect(strategy, run(_by_replica(strategy, lambda replica: tf.constant(True))), 1.0 * replicas)
    try:
        run(_by_replica(strategy, lambda replica: tf.constant(replica == replicas - 1)))
    except tf.errors.DeadlineExceededError as error:
        assert "Expected: a condition that is the same on all replicas" in str(error), error
    else:
        raise AssertionError("no error when the last replica alone sums")


PARTS = (
    functions_in_steps,
    functions_in_loops,
    loops,
    methods,
    called_before,
    freed,
    copies,
    same_object,
    sparse_input,
    other_strategies,
)


def main(engine: str, folder: str, *only: str) -> None:
    """Runs all parts, or the named ones, in this process."""
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)
    strategy = make_strategy(engine)
    parts = (*PARTS, branches) if len(strategy.extended.worker_devices) > 1 else PARTS  # No collective runs after it.
    for part in [p for p in parts if not only or p.__name__ in only]:
        error = None
        try:
            part(strategy)
        except Exception:
            error = traceback.format_exc()[-4000:]
        with open(os.path.join(folder, f"{part.__name__}.{own_rank()}.json"), "w") as file:
            json.dump(error, file)
        print(part.__name__, error or "passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
