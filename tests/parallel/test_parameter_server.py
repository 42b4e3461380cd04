"""`parameter_server`: no update of the workers is lost, for all models, optimizers and ways to train."""

from __future__ import annotations

import pytest
from coordinator_setup import ROWS, SETUP, STEPS, last_report

pytestmark = [pytest.mark.tensorflow, pytest.mark.parametrize("engine", ["parameter_server"])]

ADAM = "optimizer=lambda: keras.optimizers.Adam(0.05, {})"
MODELS = {
    "dropout": "lambda: keras.layers.Dropout(0.2)",
    "gradient accumulation": ADAM.format("gradient_accumulation_steps=2"),
    "averaged weights": ADAM.format("use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=5"),
    "clipnorm": ADAM.format("clipnorm=1.0"),
    "global_clipnorm": ADAM.format("global_clipnorm=1.0"),
    "clipvalue": ADAM.format("clipvalue=0.5"),
    "AdamW": "optimizer=lambda: keras.optimizers.AdamW(0.05, weight_decay=1e-3)",
    "momentum": "optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.5, nesterov=True)",
    "a schedule": "optimizer=lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 9, 0.9))",
    "loss scaling": "optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05), 1024.0)",
    "bfloat16": "lambda: keras.layers.Dense(8, dtype='mixed_bfloat16'), optimizer=lambda: keras.optimizers.Adam(0.05)",
    "a regularizer": "lambda: keras.layers.Dense(4, kernel_regularizer='l2'), lambda: keras.layers.GaussianNoise(0.1)",
    "run_eagerly": "run_eagerly=True",
}


def models() -> list:
    """Returns one test for each kind of model, with its part."""
    code = "    report(**train(make({}), x, y, batch_size=BATCH, epochs=6))"
    return [pytest.param(n, marks=pytest.mark.part(code.format(args), setup=SETUP)) for n, args in MODELS.items()]


@pytest.mark.parametrize("model", models())
def test_it_learns_and_counts(printed: list[str], model: str) -> None:
    seen = last_report(printed)
    assert seen["seen"] == seen["once"] == [ROWS] * 6
    assert seen["used"] == [6] * ROWS
    assert seen["steps"] == 6 * STEPS / (2 if "accumulation" in model else 1)  # Keras counts the updates.
    assert seen["loss"][-1] < seen["loss"][0]


AGAIN = """
    repetitions = [train(plain(), x, y, batch_size=BATCH, epochs=2) for _ in range(5)]
    report(repetitions=repetitions)
"""


@pytest.mark.part(AGAIN, setup=SETUP)
def test_counts_are_exact_on_every_repetition(printed: list[str]) -> None:
    for seen in last_report(printed)["repetitions"]:
        assert seen["seen"] == seen["once"] == [ROWS] * 2
        assert seen["used"] == [2] * ROWS and seen["steps"] == 2 * STEPS


MOVING = """
    def layers():
        return [lambda: keras.layers.Rescaling(1.0, offset=3.0), lambda: keras.layers.BatchNormalization(momentum=0.8)]
    model = make(*layers())
    seen = train(model, x, y, batch_size=BATCH, epochs=6)
    report(mean=model.layers[2].moving_mean.numpy().tolist(), variance=model.layers[2].moving_variance.numpy().tolist(),
         **seen)
"""


@pytest.mark.part(MOVING, setup=SETUP)
def test_moving_statistics_converge_to_those_of_the_data(printed: list[str]) -> None:
    seen = last_report(printed)
    assert seen["mean"] == pytest.approx([3.0] * 4, abs=0.7)
    # Which batches come last, and so count most, depends on the workers: 1.76 was seen.
    assert seen["variance"] == pytest.approx([1.0] * 4, abs=1.0)
    assert seen["used"] == [6] * ROWS


STATE = """
    class Watching(keras.layers.Layer):
        "State that all workers write, in the ways in which layers do."
        def build(self, shape):
            infinite = keras.initializers.Constant(float("inf"))
            def state(name, initializer="zeros", **options):
                return self.add_weight(shape=(), initializer=initializer, name=name, trainable=False, **options)
            self.own = keras.Variable(0.0, trainable=False, name="own")
            self.weight = self.add_weight(shape=(), initializer="zeros", name="weight")
            self.most, self.least = state("most"), state("least", infinite)
            self.best, self.last = state("best", infinite), state("last")
        def call(self, x, training=False):
            if training:
                self.own.assign(self.own + 1.0)
                self.weight.assign_sub(1.0)
                self.most.assign(tf.maximum(self.most, tf.reduce_max(x)))
                self.least.assign(keras.ops.minimum(tf.reduce_min(x), self.least))
                lowest = tf.reduce_min(x)
                self.best.assign(keras.ops.where(lowest < self.best, lowest, self.best))
                x = x + 0.0 * self.last
                self.last.assign(tf.reduce_mean(x[:, :1]) * 0.0 + 100.0)
            return x
    model = make(Watching)
    train(model, x, y, batch_size=BATCH, epochs=6)
    found = {variable.name: float(variable.numpy()) for variable in model.layers[1].variables}
    report(found=found, most=float(features.max()), least=float(features.min()))
"""


@pytest.mark.part(STATE, setup=SETUP)
def test_state_and_weights_that_steps_write_by_themselves(printed: list[str]) -> None:
    """A sum of the differences of two workers would be no extreme, infinity minus infinity, and 200 for 100."""
    told = last_report(printed)
    extremes = {"most": told["most"], "least": told["least"], "best": told["least"]}
    counts = {"own": 6 * STEPS, "weight": -6 * STEPS, "last": 100.0}
    assert told["found"] == pytest.approx({**counts, **extremes})


CLASSES = """
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
        model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    weights = np.linspace(0, 2, N).astype("float32")
    p = model.predict(features, verbose=0)
    each = -np.log(p[np.arange(N), labels.astype(int)])
    hit = (p.argmax(1) == labels).astype("float32")
    of_class = np.where(labels == 1, 3.0, 0.5)
    def fit(*args, **options):
        return {name: v[-1] for name, v in model.fit(*args, verbose=0, shuffle=False, **options).history.items()}
    def by_hand(weight):
        return {"loss": float((each * weight).sum() / N), "accuracy": float((hit * weight).sum() / weight.sum())}
    weighted = tf.data.Dataset.from_tensor_slices((features, labels, weights)).batch(9)
    report(of_rows=[fit(features, labels, sample_weight=weights, batch_size=9), by_hand(weights)],
         in_data=[fit(weighted), by_hand(weights)],
         of_classes=[fit(features, labels, class_weight={0: 0.5, 1: 3.0}, batch_size=9), by_hand(of_class)])
"""


@pytest.mark.part(CLASSES, setup=SETUP)
def test_sample_and_class_weights(printed: list[str]) -> None:
    for kind, (found, by_hand) in last_report(printed).items():
        assert found == pytest.approx(by_hand, rel=1e-5), kind


STRINGS = """
    words = np.array(["ant", "bee", "cat"])[np.arange(N) % 3][:, None]
    with strategy.scope():
        spelled = keras.Input((1,), dtype="string")
        looked_up = keras.layers.StringLookup(vocabulary=["ant", "bee", "cat"])(spelled)
        outputs = keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Embedding(4, 3)(looked_up)))
        model = keras.Model(spelled, outputs)
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    target = (words == "bee").astype("float32")
    words = tf.constant(words)
    history = model.fit(words, target, batch_size=BATCH, epochs=8, verbose=0).history
    pairs = tf.data.Dataset.from_tensor_slices((words, target)).batch(BATCH)
    predicted = model.predict(tf.constant([["ant"], ["bee"], ["cat"]]), verbose=0)[:, 0].tolist()
    report(loss=history["loss"], evaluated=model.evaluate(pairs, verbose=0)[0], predicted=predicted,
         steps=int(model.optimizer.iterations))
"""


@pytest.mark.part(STRINGS, setup=SETUP)
def test_strings_are_looked_up_on_the_workers(printed: list[str]) -> None:
    found = last_report(printed)
    assert found["steps"] == 8 * STEPS and found["evaluated"] < found["loss"][0]
    assert found["predicted"] == pytest.approx([0, 1, 0], abs=0.4)


OWN_STEP = """
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.rows = keras.layers.Dense(1), keras.metrics.Sum(name="rows")
        def call(self, x):
            return self.dense(x)
        def train_step(self, batch):
            inputs, targets = batch
            with tf.GradientTape() as tape:
                mean = tf.reduce_mean((self(inputs)[:, 0] - targets[:, 0]) ** 2)
            self.optimizer.apply(tape.gradient(mean, self.trainable_variables), self.trainable_variables)
            self.rows.update_state(tf.ones_like(targets[:, 0]))
            return {"squares": mean, "rows": self.rows.result(), "twice": 2 * self.rows.result()}
    class OnlyMetrics(Own):
        def train_step(self, batch):
            super().train_step(batch)
            return {m.name: m.result() for m in self.metrics}
    found = {}
    for kind in (Own, OnlyMetrics):
        with strategy.scope():
            model = kind()
            model.compile("sgd")
        history = model.fit(x[:, :4], y, batch_size=BATCH, epochs=3, verbose=0).history
        steps, at_end = int(model.optimizer.iterations), float(model.rows.result())
        found[kind.__name__] = {**history, "steps": steps, "at_end": at_end}
    report(**found)
"""


@pytest.mark.part(OWN_STEP, setup=SETUP)
def test_a_custom_train_step(printed: list[str]) -> None:
    found = last_report(printed)
    for seen in found.values():
        assert seen["rows"] == [ROWS] * 3 and seen["at_end"] == ROWS and seen["steps"] == 3 * STEPS
    assert set(found["Own"]) == {"squares", "rows", "twice", "steps", "at_end"}
    assert all(value > 0 for value in found["Own"]["squares"])
    assert set(found["OnlyMetrics"]) == {"loss", "rows", "steps", "at_end"}


ON_BATCH = """
    def batches():
        return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, N, BATCH)]
    def alone(optimizer):
        model = sequential(keras.layers.Dense(8))
        model.compile(optimizer(), crossentropy, metrics=metrics())
        return model
    found = {}
    for name, optimizer in {"SGD": keras.optimizers.SGD, "Adam": keras.optimizers.Adam}.items():
        here, there = alone(optimizer), make(lambda: keras.layers.Dense(8), optimizer=optimizer)
        there.set_weights(here.get_weights())
        for one, other in zip(batches(), batches()):
            expected, logs = here.train_on_batch(*one, return_dict=True), there.train_on_batch(*other, return_dict=True)
        apart = max(np.abs(a - b).max() for a, b in zip(here.get_weights(), there.get_weights()))
        tested = [model.test_on_batch(x, y, return_dict=True) for model in (here, there)]
        predicted = [model.predict_on_batch(x) for model in (here, there)]
        found[name] = {"apart": float(apart), "steps": int(there.optimizer.iterations),
                       "logs": {k: [float(expected[k]), float(logs[k])] for k in expected},
                       "tested": [{k: float(v) for k, v in one.items()} for one in tested],
                       "predicted": float(np.abs(predicted[0] - predicted[1]).max())}
    report(**found)
"""


@pytest.mark.part(ON_BATCH, setup=SETUP)
def test_on_batch_methods_run_steps_in_order(printed: list[str]) -> None:
    for found in last_report(printed).values():
        assert found["apart"] < 1e-6 and found["predicted"] < 1e-6 and found["steps"] == STEPS
        assert found["logs"]["seen"] == [2, 2]  # Keras resets the metrics for each; the last has 2 rows.
        for here, there in found["logs"].values():
            assert there == pytest.approx(here, rel=1e-5)
        assert found["tested"][1] == pytest.approx(found["tested"][0], rel=1e-5)


REFUSED = """
    try:
        train(make(jit_compile=True), x, y)
    except tfdistkit.errors.UnsupportedError as error:
        report(said=str(error), **train(plain(), x, y, batch_size=BATCH, epochs=1))
"""


@pytest.mark.part(REFUSED, setup=SETUP)
def test_xla_is_refused(printed: list[str]) -> None:
    found = last_report(printed)
    assert "`jit_compile=True` cannot work here" in found["said"] and found["used"] == [1] * ROWS
