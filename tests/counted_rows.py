"""A training that writes down which rows each step trained on, for jobs whose number of workers changes."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable
from pathlib import Path

ROWS, BATCH, EPOCH, EPOCHS = 24 * 12 - 5, 24, 12, 3
STEPS = EPOCH * EPOCHS

# Begins a script: `model` on `data` under the strategy `strategy`; `write_step(file, step, model)` writes a line.
SETUP = """
import json, os, pathlib, signal, sys, time
import keras, numpy as np, tensorflow as tf
import tfdistkit
from tfdistkit.callbacks import BackupAndResume

attempt, here = int(os.environ.get("TFDISTKIT_ATTEMPT", "0")), pathlib.Path.cwd()
strategy = tfdistkit.strategy(sys.argv[1], timeout_s=30)
rank, workers = tfdistkit.rank(), tfdistkit.world_size()
random = np.random.default_rng(0)
x = random.normal(size=(24 * 12 - 5, 4)).astype("float32")
y = (x[:, :1] * 2 - x[:, 1:2]).astype("float32")


class Seen(keras.Model):
    "Writes down which rows it trains on."
    def train_step(self, data):
        x, y, number = data
        self.rows.assign(tf.concat([number, -tf.ones([24 - tf.shape(number)[0]], tf.int64)], 0))
        return super().train_step((x, y))


class Rows(keras.metrics.Metric):
    "Counts rows, which no metric of Keras does: each rank updates it with the rows of all."
    def __init__(self):
        super().__init__(name="rows")
        self.seen = self.add_weight(name="seen", initializer="zeros")
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign_add(tf.cast(tf.shape(y_pred)[0], "float32"))
    def result(self):
        return self.seen.value


def write_step(file, step, model):
    file.write(json.dumps([step, [int(n) for n in model.rows.numpy() if n >= 0]]) + "\\n")


keras.utils.set_random_seed(5)
with strategy.scope():
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs))
    model = Seen(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae", Rows()])
model.rows = tf.Variable(tf.zeros([24], tf.int64), shape=[None], trainable=False)
data = tf.data.Dataset.from_tensor_slices((x, y, np.arange(len(x), dtype="int64"))).shuffle(len(x), seed=1).batch(24)
"""

# Ends it: rank 0 writes the weights and the losses of `history`.
RESULT = """
if rank == 0:
    values = [keras.ops.convert_to_numpy(v) for v in (*model.weights, *model.optimizer.variables)]
    np.savez(here / "result.npz", *values)
    (here / "history.json").write_text(json.dumps({**history.history, "workers": workers}))
"""


def rows_by_step(files: Iterable[Path]) -> dict[int, list[list[int]]]:
    """Returns the rows of each rank by step, as the ranks of one attempt wrote them."""
    by_step: dict[int, list[list[int]]] = collections.defaultdict(list)
    for path in sorted(files):
        for line in path.read_text().splitlines():
            if line.endswith("]]"):  # Not the half of one, where a rank was killed.
                step, rows = json.loads(line)
                by_step[step].append(rows)
    return by_step


def require_each_row_once(*attempts: dict[int, list[list[int]]]) -> None:
    """Checks that each step, as its last run computed it, and so each epoch, has each row once."""
    done: dict[int, list[list[int]]] = {}
    for attempt in attempts:
        done.update(attempt)
    assert sorted(done) == list(range(STEPS))
    for epoch in range(EPOCHS):
        seen = collections.Counter(
            row for step in range(epoch * EPOCH, (epoch + 1) * EPOCH) for rows in done[step] for row in rows
        )
        assert seen == dict.fromkeys(range(ROWS), 1), (epoch, seen.most_common(3))
