"""The check of a step of the user's own, where the replicas are processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_processes import run_workers

MODEL = """
    import os
    import tfdistkit
    strategy = tfdistkit.strategy("multiworker", timeout_s=60, communication="COMMUNICATION", check_step=CHECK)
    import keras, numpy as np, tensorflow as tf
    from keras import ops
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(13, 6)).astype("float32"), rng.normal(size=(13, 2)).astype("float32")

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.drop, self.out = (
                keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(2))
            self.unused = keras.layers.Dense(3)
        def call(self, x, training=None):
            return self.out(self.drop(self.hidden(x), training=training))
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                p = self(x, training=True)
                loss = LOSS
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"own": loss}

    with strategy.scope():
        model = Own()
        model.compile("adam")
"""
FIT = """
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    try:
        model.fit(data, epochs=2, verbose=0)
        print("trained", [round(float(np.abs(w).sum()), 5) for w in model.get_weights()])
    except tfdistkit.errors.UnsupportedError as error:
        print("refused", "must have the gradients of one process" in str(error))
"""
SQUARE = "ops.mean(ops.square(y - p))"
PAIRS = "ops.mean(ops.square(p[:, 0][:, None] - p[:, 0]))"
TRANSPORTS = ("shm", pytest.param("ring", marks=pytest.mark.thorough))


def code(loss: str, rest: str = FIT, communication: str = "auto", check: bool = True) -> str:
    model = MODEL.replace("LOSS", loss).replace("COMMUNICATION", communication).replace("CHECK", str(check))
    return model + rest


@pytest.mark.parametrize("communication", TRANSPORTS)
def test_all_ranks_refuse_a_loss_of_pairs(tmp_path: Path, communication: str) -> None:
    for printed in run_workers(code(PAIRS, communication=communication), tmp_path):
        assert "refused True" in printed


@pytest.mark.parametrize("communication", TRANSPORTS)
def test_a_mean_trains_as_without_the_check(tmp_path: Path, communication: str) -> None:
    checked, unchecked = (
        run_workers(code(SQUARE, communication=communication, check=check), tmp_path) for check in (True, False)
    )
    assert "trained" in checked[0] and "trained" in checked[1]
    weights = {one[one.index("trained") :] for one in (*checked, *unchecked)}
    assert len(weights) == 1, weights


HARDEST = "ops.mean(tf.math.top_k(ops.mean(ops.square(y - p), axis=1), 5)[0])"


@pytest.mark.parametrize("communication", TRANSPORTS)
def test_a_step_that_needs_more_rows_than_are_tried_trains(tmp_path: Path, communication: str) -> None:
    # Of 13 rows the second rank has 6, and 4 in the trial, where it fails: the first must not wait for it there.
    rest = FIT.replace("batch(5)", "batch(13)")
    for printed in run_workers(code(HARDEST, rest, communication), tmp_path):
        assert "trained" in printed


def test_data_of_each_rank_is_checked(tmp_path: Path) -> None:
    slices = "tf.data.Dataset.from_tensor_slices((x, y))"
    rest = FIT.replace(slices, f"tfdistkit.data.shard({slices})")
    for loss, expected in ((PAIRS, "refused True"), (SQUARE, "trained")):
        for printed in run_workers(code(loss, rest), tmp_path):
            assert expected in printed


def test_ragged_data_is_checked(tmp_path: Path) -> None:
    words = "tf.ragged.constant([[float(i)] * (1 + i % 4) for i in range(13)])"
    rest = FIT.replace("(x, y)", f"((x, {words}), y)")
    for loss, expected in ((PAIRS, "refused True"), (SQUARE, "trained")):
        model = code(loss, rest).replace("self.hidden(x)", "self.hidden(x[0] + tf.reduce_sum(x[1], 1, keepdims=True))")
        for printed in run_workers(model, tmp_path):
            assert expected in printed


def test_a_rank_that_cannot_try_lets_all_train(tmp_path: Path) -> None:
    loss = PAIRS + " * (1.0 if tfdistkit.is_chief() or not tf.inside_function() else self.fails())"
    broken = (
        code(loss)
        .replace("self.unused = keras.layers.Dense(3)", "pass")
        .replace("class Own(keras.Model):", "class Own(keras.Model):\n        tries = 0")
        .replace(
            "        def train_step",
            "        def fails(self):\n"
            "            Own.tries += 1\n"
            "            if Own.tries == 1:\n"
            "                raise ValueError('the first trace')\n"
            "            return 1.0\n"
            "        def train_step",
        )
    )
    for printed in run_workers(broken, tmp_path):
        assert "trained" in printed
