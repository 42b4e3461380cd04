"""Branches of a step, and of functions outside of steps, which AutoGraph converts (see `test_two_devices`)."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfdistkit
from tfdistkit.errors import UnsupportedError
from tfdistkit.strategies.sync.aggregates import global_conditions

pytestmark = pytest.mark.tensorflow

X = np.random.default_rng(0).normal(size=(39, 4)).astype("float32")
Y = (X @ np.arange(1.0, 5.0)[:, None]).astype("float32")


@pytest.fixture(scope="module")
def strategy() -> Any:
    return tfdistkit.strategy("mirrored", devices=2)


def _with_tensors(x: Any) -> Any:
    """Chooses by a tensor: AutoGraph must convert it where a branch calls it."""
    if tf.reduce_sum(x) > 3.0:
        x = 2.0 * x
    for i in tf.range(3):
        x = x + tf.cast(i, x.dtype)
    return x


@tf.function
def _in_branches(x: Any) -> Any:
    if tf.reduce_sum(x) > 0.0:
        first = _with_tensors(x)
    else:
        first = x
    return first, tf.cond(tf.reduce_sum(x) > 1.0, lambda: _with_tensors(x), lambda: x)


def test_functions_that_branches_call_are_converted(strategy: Any) -> None:
    for one in _in_branches(tf.constant([2.0, 3.0])):
        np.testing.assert_array_equal(one, [7.0, 9.0])


class Chosen(keras.Model):
    """Chooses what it does by numbers of the batch."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.out = how, keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def train_step(self, data: Any) -> Any:
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            error = ops.square(y - self(x))
            loss = ops.mean(error)
            if self.how == "any":
                loss = tf.cond(tf.reduce_any(error > 40.0), lambda: tf.reduce_mean(2.0 * error), lambda: loss)
            if self.how == "nested":
                loss = ops.cond(
                    loss > 9.0, lambda: 3 * loss, lambda: ops.cond(2 * loss > 9.0, lambda: 2 * loss, lambda: loss)
                )
        gradients = tape.gradient(loss, weights)
        if self.how in ("applied", "by_a_row", "drawn"):
            condition = loss > 4.0 if self.how == "applied" else x[0, 0] > 0.0
            condition = tf.random.uniform([], seed=5) < 0.5 if self.how == "drawn" else condition

            def apply() -> Any:
                self.optimizer.apply(gradients, weights)
                return 1.0

            return {"loss": loss, "applied": tf.cond(condition, apply, lambda: 0.0)}
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


class Converted(Chosen):
    """Chooses by `if`, `and` and `x if y else z`, which AutoGraph converts."""

    def __init__(self, how: str):
        super().__init__(how)
        self.count = tf.Variable(0.0, trainable=False)
        self.large = keras.metrics.Mean(name="large")

    @tf.function
    def note(self, loss: Any, chosen: Any) -> None:
        if loss > 5.0 and chosen < 12.0:
            self.count.assign_add(1.0)
        self.count.assign_add(tf.constant(10.0) if loss > 3.0 else tf.constant(20.0))
        if chosen > 4.0:
            self.large.update_state(chosen)

    @tf.function
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            error = ops.square(y - self(x))[:, 0]
            loss = ops.mean(error)
        mask = tf.cast(y[:, 0] > 0, tf.float32)
        chosen = tf.reduce_sum(error * mask) / tf.reduce_sum(mask) if self.how == "noted" else loss
        self.note(loss, chosen)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.how != "updated" or loss > 4.0:
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "large": self.large.result()}


class MeanOfSome(Chosen):
    """Trains on the mean of some rows where there are many of them, as in the second batch."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            error = ops.square(y - self(x))[:, 0]
            mask = tf.cast(y[:, 0] < 0, tf.float32)
            of_some, of_all = tf.reduce_sum(error * mask) / tf.reduce_sum(mask), ops.mean(error)
            are_many = tf.reduce_sum(mask) > 6.5
            if self.how == "branch":
                loss = tf.cond(are_many, lambda: tf.reduce_sum(error * mask) / tf.reduce_sum(mask), lambda: of_all)
            else:
                loss = tf.where(are_many, of_some, of_all)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


CASES = [(Chosen, "any"), (Chosen, "nested"), (Chosen, "applied"), (Chosen, "drawn")]
CASES += [(Converted, "noted"), (Converted, "updated"), (MeanOfSome, "value")]


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_replicas_take_the_branch_of_one_process(strategy: Any, kind: Any, how: str) -> None:
    def trained(scope: Any) -> list[Any]:
        tf.random.set_seed(3)
        with scope:
            model = kind(how)
            model(X[:1])
            model.compile(keras.optimizers.SGD(0.03))
            model.optimizer.build(model.trainable_variables)
        history = model.fit(X, Y, batch_size=13, epochs=4, shuffle=False, verbose=0).history
        state = [model.count.numpy(), history["large"]] if kind is Converted else []
        return [*model.get_weights(), history["loss"], *state]

    expected = trained(tf.distribute.get_strategy().scope())
    for one, other in zip(trained(strategy.scope()), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_updates_in_a_branch_chosen_by_rows_are_refused(strategy: Any) -> None:
    """A replica would wait for those that take the other branch."""
    with strategy.scope():
        model = Chosen("by_a_row")
        model(X[:1])
        model.compile(keras.optimizers.SGD(0.03))
    with pytest.raises(UnsupportedError, match="A branch that each replica chooses by its own rows must not update"):
        model.fit(X, Y, batch_size=13, verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_the_branch_that_the_first_batch_does_not_take_is_checked(strategy: Any) -> None:
    with strategy.scope():
        model = MeanOfSome("branch")
        model(X[:1])
        model.compile(keras.optimizers.SGD(0.03))
    with pytest.raises(UnsupportedError, match=r"where conditions .* are True(.|\n)*Choose values, not branches"):
        model.fit(X, Y, batch_size=13, verbose=0)
    assert int(model.optimizer.iterations) == 0


class Median(keras.Model):
    """Evaluates by a median of the rows, and by a constant, a variable, that counts once a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.median, self.constant = keras.metrics.Mean(name="median"), keras.metrics.Sum(name="constant")
        self.two = self.add_weight(shape=(), initializer=keras.initializers.Constant(2.0), trainable=False)

    def test_step(self, data: Any) -> Any:
        x, _ = data
        self.median.update_state(ops.median(x[:, 0]))
        self.constant.update_state(ops.convert_to_tensor(self.two))
        return {"median": self.median.result(), "constant": self.constant.result()}


def test_numbers_of_rows_in_a_test_step(strategy: Any) -> None:
    with strategy.scope():
        model = Median()
        model.compile()
    with pytest.warns(UserWarning, match=r"'median' in `test_step` compares rows \(the largest of all of them"):
        logs = model.evaluate(X, Y, batch_size=13, verbose=0, return_dict=True)
    assert logs["constant"] == 2.0 * 3


class Evaluates(keras.Model):
    """Logs a number of the rows that it evaluates, without a metric, and predicts what `of` makes of them."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = of

    def call(self, x: Any) -> Any:
        return x

    def test_step(self, data: Any) -> Any:
        return {"number": self.of(data[0][:, 0])}

    def predict_step(self, data: Any) -> Any:
        return self.of(data)


def _made(strategy: Any, of: Any) -> keras.Model:
    with strategy.scope():
        model = Evaluates(of)
        model.compile()
    return model


COMPARING = {
    "a quantile": lambda e: ops.quantile(e, 0.9),
    "pairs": lambda e: ops.mean(ops.abs(e[:, None] - e[None])),
    "an entropy": lambda e: -ops.sum(ops.softmax(e) * ops.log_softmax(e)),
    "distinct values": lambda e: tf.size(tf.unique(tf.round(e))[0]),
}
PLAIN = {"a mean": ops.mean, "a deviation": ops.std, "the largest": ops.max, "rows": lambda e: e * 2.0}


@pytest.mark.parametrize("name", [*COMPARING, *PLAIN])
def test_numbers_of_rows_in_the_logs_of_a_test_step(strategy: Any, name: str, recwarn: Any) -> None:
    model = _made(strategy, {**COMPARING, **PLAIN}[name])
    found = model.evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)["number"]
    told = [str(one.message) for one in recwarn if "compares rows" in str(one.message)]
    assert bool(told) == (name in COMPARING) and all("A number in the logs of `test_step`" in one for one in told)
    expected = _made(tf.distribute.get_strategy(), model.of).evaluate(X, Y, batch_size=7, verbose=0, return_dict=True)
    assert name in COMPARING or np.allclose(found, expected["number"])


def test_rows_that_a_predict_step_compares(strategy: Any, recwarn: Any) -> None:
    _made(strategy, lambda x: ops.tanh(x)).predict(X, batch_size=7, verbose=0)
    assert not [one for one in recwarn if "compares rows" in str(one.message)]
    with pytest.warns(UserWarning, match="An output of `predict_step` compares rows"):
        _made(strategy, lambda x: ops.softmax(x, axis=0)).predict(X, batch_size=7, verbose=0)


def test_branches_of_libraries_stay(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some depend on whether a replica has rows; and each would take a collective more in every step."""
    found: list[Any] = []
    original = global_conditions._of_global_batch
    monkeypatch.setattr(global_conditions, "_of_global_batch", lambda *args: found.append(args) or original(*args))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mse", metrics=["mae"])
    model.fit(X, Y, batch_size=19, verbose=0)
    assert not found


def _scaled(values: Any, number: Any) -> Any:
    factor = tf.constant(1.0)
    if tf.reduce_sum(number) > 2.0:
        factor = tf.constant(0.5)
    for _ in tf.range(3):
        factor += 1.0
    return tf.reduce_sum(values) * factor


@pytest.mark.parametrize("kind", ["lambda", "nested function", "loop"])
def test_what_a_converted_function_of_the_replicas_calls_is_converted(strategy: Any, kind: str) -> None:
    number = tf.constant([3.0])
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(tf.ones((6, 2))).batch(6))

    @tf.function
    def step(batch: Any) -> Any:
        def replica(part: Any) -> Any:
            return _scaled(part, number)

        run = replica if kind == "nested function" else lambda part: _scaled(part, number)
        return strategy.reduce("SUM", strategy.run(run, args=(batch,)), axis=None)

    @tf.function
    def epoch() -> Any:
        total = 0.0
        for batch in data:
            total += step(batch)
        return total

    found = epoch() if kind == "loop" else step(next(iter(data)))
    assert float(found) == 12 * 3.5
