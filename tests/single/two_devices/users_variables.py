"""Variables that steps, layers and optimizers write as users write them (see `test_two_devices`)."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from _one_process import ROWS, TARGETS, batches, require_equal
from _own_steps import strategy
from keras import ops
from tensorflow.python.training import moving_averages

import tfdistkit

__all__ = ["strategy"]  # The fixture.

pytestmark = pytest.mark.tensorflow


class Step(keras.Model):
    """A step of one's own that writes variables of TensorFlow's, made as a kind of them is."""

    zero: Any = 0

    def __init__(self, **options: Any):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen = tf.Variable(self.zero, **options)
        self.moving = tf.Variable(tf.zeros([4]), **options)
        self.chance = tf.Variable(0.7, **options)
        self.state = [self.seen, self.moving, self.chance]

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            error = self(x, training=True) - y
            loss = tf.reduce_mean(error**2) + 0.01 * self.chance
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.seen.assign_add(tf.shape(x)[0])
        self.moving.assign(0.9 * self.moving + 0.1 * tf.reduce_mean(x, 0))
        # A clip, as in adaptive augmentation: no mean over rows.
        right = tf.reduce_mean(tf.sign(error))
        self.chance.assign(tf.clip_by_value(self.chance + right / 2, 0.0, 1.0))
        return {"loss": loss}


READ = tf.VariableSynchronization.ON_READ
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "summed": {"trainable": False, "aggregation": tf.VariableAggregation.SUM},
    "of the first": {"trainable": False, "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA},
    "first, on read": {
        "trainable": False,
        "aggregation": tf.VariableAggregation.ONLY_FIRST_REPLICA,
        "synchronization": READ,
    },
    "mean, on read": {"trainable": False, "aggregation": tf.VariableAggregation.MEAN, "synchronization": READ},
}


@pytest.mark.parametrize("kind", KINDS)
def test_variables_of_tensorflow(strategy: Any, kind: str) -> None:
    """Whatever they are said to be, one process knows one value; without words they are trainable, integers too."""

    def make() -> Any:
        options = dict(KINDS[kind])
        model = Step(**options) if "mean" not in kind else FloatStep(**options)
        model.compile(keras.optimizers.SGD(0.01))
        return model

    require_equal(strategy, make, batches(ROWS, TARGETS))


class Averaging(Step):
    """Averages means and sums by TensorFlow's own function, and gradients of tasks by how their losses fell (FAMO)."""

    def __init__(self) -> None:
        super().__init__(trainable=False)
        self.sums = tf.Variable(tf.zeros([4]), trainable=False)
        self.tasks = tf.Variable([0.0, 0.5], trainable=False)
        self.state = [self.moving, self.sums, self.tasks]

    def losses_of(self, x: Any, y: Any) -> tf.Tensor:
        error = self(x, training=True) - y
        return tf.stack([tf.reduce_mean(error**2), tf.reduce_mean(tf.abs(error))])

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        average = moving_averages.assign_moving_average
        average(self.moving, tf.reduce_mean(x, 0), 0.9, zero_debias=False)
        average(self.sums, tf.reduce_sum(x, 0), 0.9, zero_debias=False)
        with tf.GradientTape() as tape:
            before = self.losses_of(x, y)
            loss = tf.reduce_sum(before * tf.nn.softmax(self.tasks))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        fallen = tf.math.log(before) - tf.math.log(self.losses_of(x, y))
        with tf.GradientTape() as tape:
            tape.watch(self.tasks)
            weights = tf.nn.softmax(self.tasks)
        self.tasks.assign_sub(tape.gradient(weights, self.tasks, output_gradients=fallen))
        return {"loss": loss}


def test_averages_of_tensorflow_and_gradients_times_numbers_of_the_batch(strategy: Any) -> None:
    def make() -> Any:
        model = Averaging()
        model.compile(keras.optimizers.SGD(0.01))
        return model

    require_equal(strategy, make, batches(ROWS, TARGETS), rtol=1e-4)


class Scattering(Step):
    """Writes parts of variables, as `tf.Variable` lets them be written: sums over rows, and means."""

    def __init__(self) -> None:
        super().__init__(trainable=False)
        self.table, self.counts, self.steps = (tf.Variable(tf.zeros([4, 4]), trainable=False) for _ in range(3))
        self.state = [self.table, self.counts, self.steps]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        nearest, step = tf.argmax(x, -1), tf.cast(self.optimizer.iterations % 4, tf.int64)
        self.table.scatter_add(tf.IndexedSlices(x, nearest))
        self.table.scatter_sub(tf.IndexedSlices(0.5 * x, nearest))
        self.counts.scatter_nd_add(nearest[:, None], tf.ones_like(x))
        self.steps.scatter_update(tf.IndexedSlices(tf.reduce_mean(x, 0)[None], step[None]))
        self.steps[0].assign(0.5 * self.steps[0] + tf.reduce_mean(x, 0))
        self.steps[1:3, 2].assign(tf.reduce_sum(x))
        return super().train_step(data)


def test_parts_of_variables_of_tensorflow(strategy: Any) -> None:
    def make() -> Any:
        model = Scattering()
        model.compile(keras.optimizers.SGD(0.01))
        return model

    require_equal(strategy, make, batches(ROWS, TARGETS))


def test_trainable_variables_of_tensorflow_in_central_storage() -> None:
    """There replicas share weights, and so floats without `trainable=False`; integers are state of each."""

    def make() -> Any:
        model = Step()
        model.compile(keras.optimizers.SGD(0.01))
        return model

    require_equal(tfdistkit.strategy("central_storage", devices=2), make, batches(ROWS, TARGETS))


class FloatStep(Step):
    """The same with a count in floats: integers have no mean."""

    zero = 0.0

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.seen.assign_add(tf.reduce_sum(x))
        self.moving.assign(0.9 * self.moving + 0.1 * tf.reduce_mean(x, 0))
        self.chance.assign(tf.clip_by_value(self.chance + tf.reduce_mean(x) / 2, 0.0, 1.0))
        return {"loss": loss}


@pytest.mark.parametrize("aggregation", ["sum", "only_first_replica"])
def test_aggregations_of_weights_of_keras(strategy: Any, aggregation: str) -> None:
    class Watching(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            options = {"initializer": "zeros", "trainable": False, "aggregation": aggregation}
            self.mean = self.add_weight(shape=(4,), name="mean", **options)
            self.total = self.add_weight(shape=(4,), name="total", **options)
            self.steps = self.add_weight(shape=(), name="steps", **options)

        def call(self, x: Any) -> Any:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            self.total.assign_add(ops.sum(x, axis=0))
            self.steps.assign_add(1.0)
            return x

    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), Watching(name="watching"), keras.layers.Dense(1, name="dense")])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    require_equal(strategy, make, batches(ROWS, TARGETS))


class Accumulating(keras.Model):
    """Applies gradients in a branch, every second step, clipped by their norm: of this step, or of both."""

    def __init__(self, accumulates: bool):
        super().__init__()
        self.dense, self.accumulates = keras.layers.Dense(1), accumulates
        self.count = tf.Variable(0, trainable=False)
        self.dense.build((None, 4))
        self.sums = [tf.Variable(tf.zeros(one.shape), trainable=False) for one in self.dense.trainable_variables]

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients):
            total.assign_add(gradient)
        self.count.assign_add(1)

        def update() -> None:
            given = [tf.convert_to_tensor(one) for one in self.sums] if self.accumulates else gradients
            clipped, _ = tf.clip_by_global_norm(given, 0.5)
            self.optimizer.apply_gradients(zip(clipped, self.trainable_variables))
            for total in self.sums:
                total.assign(tf.zeros_like(total))

        tf.cond(self.count % 2 == 0, update, lambda: None)
        return {"loss": loss}


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_that_a_branch_clips(strategy: Any, accumulates: bool) -> None:
    def make() -> Any:
        model = Accumulating(accumulates)
        model.compile(keras.optimizers.SGD(0.1))
        return model

    require_equal(strategy, make, batches(ROWS, TARGETS))


def test_optimizer_with_variables_of_tensorflow(strategy: Any) -> None:
    class Remembering(keras.optimizers.SGD):
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.before = [tf.Variable(tf.convert_to_tensor(one), trainable=False) for one in variables]
            for one in self.before:
                self._track_variable(one)

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            before = self.before[self._get_variable_index(variable)]
            before.assign(0.5 * before + 0.5 * tf.convert_to_tensor(variable))
            self.assign(variable, before - learning_rate * gradient)

    def make() -> Any:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="dense")])
        model.compile(Remembering(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    require_equal(strategy, make, batches(ROWS, TARGETS))


def _in_a_branch(write: Any) -> None:
    tf.cond(tf.equal(tf.random.uniform([], maxval=1, dtype=tf.int32), 0), write, lambda: None)


def _in_a_loop(write: Any) -> None:
    def body(turn: Any) -> Any:
        write()
        return [turn + 1]

    tf.while_loop(lambda turn: turn < 1, body, [tf.constant(0)])


# Where a step writes.
PLACES: dict[str, Any] = {
    "the step": lambda write: write(),
    "a branch": _in_a_branch,
    "a loop": _in_a_loop,
    "a function": lambda write: tf.function(write)(),
}


class Descent(keras.Model):
    """Gradient descent without an optimizer, and a number that a branch keeps, in a variable of TensorFlow's."""

    def __init__(self, place: str):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.place = PLACES[place]
        self.kept = tf.Variable(tf.zeros([2]))
        self.state = [self.kept]

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2) / (1.0 + tf.abs(self.kept[0]))
        gradients = tape.gradient(loss, self.trainable_variables)

        def write() -> None:
            for gradient, variable in zip(gradients, self.trainable_variables):
                variable.assign_sub(0.01 * gradient)
            self.kept.assign(tf.stack([tf.reduce_mean(x), tf.reduce_mean(y)]))

        self.place(write)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("place", "eager"), [*((place, False) for place in PLACES), ("the step", True), ("a branch", True)]
)
def test_weights_that_a_step_writes_by_itself(strategy: Any, place: str, eager: bool) -> None:
    def make() -> Any:
        model = Descent(place)
        model.compile(keras.optimizers.SGD(0.01), run_eagerly=eager)
        return model

    require_equal(strategy, make, batches(ROWS, TARGETS))


class InPython(keras.metrics.Metric):
    """Computes its result in Python, whose shape TensorFlow does not know: a score of another library."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.total = self.add_weight(name="total", initializer="ones")

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.abs(y - predicted)))

    def result(self) -> Any:
        return tf.py_function(lambda total: total / 2.0, [self.total.value], tf.float32)


def test_a_metric_whose_result_is_computed_in_python(strategy: Any) -> None:
    def logs(strategy: Any) -> Any:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=[InPython(name="score")])
        history = model.fit(ROWS, TARGETS, batch_size=7, epochs=2, shuffle=False, verbose=0).history
        return pytest.approx(history["score"], rel=1e-5)

    assert logs(strategy) == logs(tf.distribute.get_strategy()).expected
