"""What one rank alone changes (weights, learning rates, losses) is an error on all ranks when training begins."""

from __future__ import annotations

import json

import pytest
from rank_jobs import OVER_ONE

pytestmark = pytest.mark.tensorflow

APART = """
import json, os, tempfile, time
import keras, numpy as np
import tensorflow as tf
import tfdistkit
from tfdistkit.callbacks import BroadcastVariables, ChiefCheckpoint

D = tf.data.Dataset
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x.sum(1, keepdims=True)
found = {}


class KnowsItsRank(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.number = rank

    def call(self, inputs):
        return inputs


def made(loss="mse", dropout=0.1, last=(), **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dropout(dropout),
                                  keras.layers.Dense(1, name="head"), *last])
        model.compile(keras.optimizers.Adam(0.01), loss, **options)
    return model


def told(model, change=None, **options):
    try:
        if change is not None:
            change(model)
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False, **options)
    except tfdistkit.errors.TfdistkitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_batches(model, change, use=lambda model: model.train_on_batch(x[:8], y[:8])):
    try:
        change(model)
        use(model)
    except tfdistkit.errors.TfdistkitError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def load_on_chief(model):
    if rank == 0:
        model.set_weights([w + 0.5 for w in model.get_weights()])


def set_rate(model):
    model.optimizer.learning_rate = 0.01 * (1 + rank)


class Rounds(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        for weight in self.model.weights:
            weight.assign(weight * (1 + 1e-6 * rank))


schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 * (1 + rank * epoch))
found["weights"] = told(made(), load_on_chief)
found["state of a layer"] = told(
    made(), lambda m: rank or m.layers[0].moving_mean.assign(np.full(4, 3.0)))
found["rate"] = told(made(), set_rate)
found["rate of epoch 2"] = told(made(), epochs=2, callbacks=[schedule])
found["loss"] = told(made(["mse", "mae"][rank]))
found["argument of a loss"] = told(made(keras.losses.Huber(1.0 + rank)))
found["function"] = told(made([lambda y, p: (y - p) ** 2, lambda y, p: abs(y - p)][rank]))
found["metrics"] = told(made(metrics=["mae", "mape"][:: 1 - 2 * rank]))
with strategy.scope():
    accuracy, auc = keras.metrics.BinaryAccuracy(threshold=0.4 + 0.1 * rank), keras.metrics.AUC()
found["argument of a metric"] = told(made(weighted_metrics=[accuracy]))
found["weight of a loss"] = told(made(loss_weights=[1.0 + rank]))
found["argument of a layer"] = told(made(dropout=0.1 + 0.4 * rank))
found["activation"] = told(made(last=[keras.layers.Activation(["relu", "linear"][rank])]))


def looks_up(tokens):
    with strategy.scope():
        words = keras.Input((3,), dtype="string")
        ids = keras.layers.StringLookup(vocabulary=tokens)(words)
        model = keras.Model(words, keras.layers.Flatten()(keras.layers.Embedding(4, 1)(ids)))
        model.compile("sgd", "mse")
    return model


words = D.from_tensor_slices((np.array([["a", "b", "c"]] * 8), np.ones((8, 3), "float32"))).batch(4)
for case, tokens in {"vocabulary": ["abc", "cba"][rank], "equal vocabularies": "bca"}.items():
    found[case] = on_batches(looks_up(list(tokens)), lambda m: None, lambda m: m.fit(words, verbose=0))
columns = {name: x[:, i : i + 1] for i, name in enumerate("abcd")}


def wired(order, name=lambda column: None, same=True):
    # A set of strings has another order in each process.
    with strategy.scope():
        inputs = {column: keras.Input((1,), name=column) for column in (sorted(order) if same else order)}
        towers = [keras.layers.Dense(2, name=name(column))(inputs[column]) for column in order]
        joined = keras.ops.multiply(keras.layers.Concatenate()(towers), 0.5)
        model = keras.Model(inputs, keras.layers.Dense(1)(joined))
        model.compile("sgd", "mse")
    return on_batches(model, lambda m: None, lambda m: m.fit(columns, y, verbose=0))


def skips(place):
    with strategy.scope():
        inputs = keras.Input((4,))
        towers = [keras.layers.Dense(2)(inputs) for _ in range(2)]
        both = keras.layers.Concatenate()([*towers, towers[place]])
        model = keras.Model(inputs, keras.layers.Dense(1)(both))
        model.compile("sgd", "mse")
    return told(model)


mixed = ["abcd", "dcba"][rank]
found["another connection"] = skips(rank)
found["equal connections"] = skips(1)
found["columns in another order"] = wired(mixed)
found["inputs in another order"] = wired(mixed, same=False)
found["towers in another order"] = wired(mixed, lambda column: "of_" + column)
found["the same order"] = wired("cabd", lambda column: "of_" + column)
found["names of one process"] = wired("cabd", lambda column: f"of_{column}_{os.getpid()}")
norm = keras.constraints.MaxNorm
found["regularizer"] = told(made(last=[keras.layers.Dense(1, kernel_regularizer=[None, "l2"][rank])]))
by_rank = keras.regularizers.L1(1.0 + rank)
found["number of a regularizer"] = told(made(last=[keras.layers.Dense(1, bias_regularizer=by_rank)]))
found["constraint"] = told(made(last=[keras.layers.Dense(1, kernel_constraint=norm(1.0 + rank))]))
found["equal constraints"] = told(made(last=[keras.layers.Dense(1, kernel_constraint=norm(1.0))]))
found["one more layer"] = told(made(last=[keras.layers.Flatten()] * rank))


def with_other_variables():
    try:
        with strategy.scope():
            keras.layers.Dense(2 + rank).build((None, 4))
    except tfdistkit.errors.TfdistkitError as error:
        return f"{type(error).__name__}: {error}".partition(" of shape")[0]


found["other variables"] = with_other_variables()
found["weights, on batches"] = on_batches(made(), load_on_chief)
found["rate, on batches"] = on_batches(made(), set_rate)
found["weights, evaluated"] = on_batches(made(), load_on_chief, lambda m: m.evaluate(x, y, verbose=0))
found["weights, predicted"] = on_batches(made(), load_on_chief, lambda m: m.predict(x, verbose=0))


class Late(ChiefCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0 if rank else 2)  # The chief saves when the other rank has long ended its last epoch.
        super().on_epoch_end(epoch, logs)


def train_and_load(model):
    path = os.path.join(tfdistkit.collectives.broadcast_object(tempfile.mkdtemp()), "last.weights.h5")
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[Late(path, save_weights_only=True)])
    model.load_weights(path)


found["loaded after fit"] = on_batches(made(), train_and_load, lambda m: m.evaluate(x, y, verbose=0))
found["equal"] = told(made(), epochs=3, validation_data=(x, y))
found["layer of one's own"] = told(made(last=[KnowsItsRank()]))
found["equal metrics"] = told(made("binary_crossentropy", metrics=["mae", lambda y, p: abs(y - p), auc]))
found["equal functions"] = told(made(lambda y, p: (y - p) ** 2))
found["broadcast"] = told(made(), load_on_chief, callbacks=[BroadcastVariables()])
found["broadcast rate"] = told(made(), set_rate, callbacks=[BroadcastVariables()])
found["rounding"] = told(made(), callbacks=[Rounds()])
keras.utils.set_random_seed(3 + rank)
found["seeds"] = told(made())
model = made()
told(model)
found["again"] = told(model, lambda m: m.set_weights(m.get_weights()))
strategy.check_data = False
found["turned off"] = told(made(), load_on_chief)
strategy.check_data = True
print(json.dumps(found))
"""

DIFFER = {
    "weights": "batch_normalization",
    "state of a layer": "moving_mean` on rank 1 differs from that on rank 0 by up to 3",
    "rate": "Adam: 0.01 on rank 0, Adam: 0.02 on rank 1",
    "rate of epoch 2": "their learning rates differ",
    "loss": "['mse', None] on rank 0, ['mae', None] on rank 1",
    "argument of a loss": "their losses differ",
    "function": "their losses differ",
    "weight of a loss": "[1.0]] on rank 0",
    "metrics": "their metrics differ. Received: [['mae', 'mape'], None] on rank 0",
    "argument of a metric": "'threshold': 0.4",
    "argument of a layer": "'rate': 0.1",
    "activation": "'relu'",
    "vocabulary": "StringLookup of [UNK], a, b, c, ... (4 tokens, hash",
    "columns in another order": "the same layers in another order: 'a' on rank 0 is 'd' on rank 1",
    "inputs in another order": "the same layers in another order: 'a' on rank 0 is 'd' on rank 1",
    "another connection": "their connections of layers differ",
    "towers in another order": "in another order: 'a' on",
    "regularizer": "'kernel_regularizer'",
    "number of a regularizer": "'l1': 2.0",
    "constraint": "'max_value': 2.0",
    "other variables": "must make the same variables, in the same order. Received: 'kernel'",
    "one more layer": "None on rank 0, ['Flatten'",
    "weights, on batches": "their weights differ",
    "rate, on batches": "their learning rates differ",
    "weights, evaluated": "their weights differ",
    "weights, predicted": "their weights differ",
}


@pytest.mark.parametrize("engine", OVER_ONE)
@pytest.mark.part(APART)
def test_ranks_train_the_same_model(printed: list[str]) -> None:
    one, two = (json.loads(text.splitlines()[-1]) for text in printed)
    assert one == two
    for case, words in DIFFER.items():
        assert one[case].startswith("DivergenceError") and words in one[case], (case, one[case])
    assert "BroadcastVariables(root_rank=0)" in one["weights"] and "check_data=False" in one["weights"]
    others = {case: text for case, text in one.items() if case not in DIFFER}
    assert others == dict.fromkeys(others, "no error") and "turned off" in others


LOCAL = """
import keras, numpy as np
import tfdistkit
from tfdistkit.algorithms import LocalSGD

strategy = tfdistkit.strategy(engine, algorithm=LocalSGD(3))
x, y = np.random.default_rng(0).normal(size=(40, 4)).astype("float32"), np.ones((40, 1), "float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
for _ in range(2):
    model.train_on_batch(x[:8], y[:8])
assert not strategy.has_equal_weights()
model.fit(x, y, batch_size=8, epochs=3, verbose=0)
model.fit(x, y, batch_size=8, epochs=3, verbose=0)
print("trained")
"""


@pytest.mark.parametrize("engine", ["multiworker"])
@pytest.mark.part(LOCAL, setup="")
def test_weights_between_two_averages_are_not_compared(printed: list[str]) -> None:
    assert all(text.endswith("trained\n") for text in printed)
