"""Real jobs that are killed or get a signal: `BackupAndResume` with `tfdistkit run --max-restarts`."""

from __future__ import annotations

import collections
import json
import pathlib
import random
import signal

import pytest
from job_process import write_script
from rank_jobs import start_ranks

# Perhaps Horovod has to be built first.
pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(1800)]

# Of an epoch, and of all.
EPOCH, STEPS = 12, 36

TRAIN = """
import json, os, pathlib, signal, sys, time
import keras, numpy as np, tensorflow as tf
import tfdistkit
from tfdistkit.callbacks import BackupAndResume

engine, kill_at, number, signal_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
attempt, here = int(os.environ["TFDISTKIT_ATTEMPT"]), pathlib.Path.cwd()
strategy = tfdistkit.strategy(engine)
rank = tfdistkit.rank()
x = np.random.default_rng(0).normal(size=(8 * 12 - 3, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, (x[:, :1] > 0).astype("float32"), np.arange(len(x), dtype="int64")))
steps = (here / f"steps.{attempt}.{rank}").open("w", buffering=1)


class Seen(keras.Model):
    "Writes down which rows it trains on."
    def train_step(self, data):
        x, y, number = data
        self.rows.assign(tf.concat([number, -tf.ones([8 - tf.shape(number)[0]], tf.int64)], 0))
        return super().train_step((x, y))


class Fate(keras.callbacks.Callback):
    def __init__(self, is_real):
        super().__init__()
        self.is_real, self.epoch = is_real, 0
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
    def on_train_batch_end(self, batch, logs=None):
        step = self.epoch * 12 + batch
        if not self.is_real:
            return
        rows = [int(n) for n in self.model.rows.numpy() if n >= 0]
        steps.write(json.dumps([step, rows]) + "\\n")
        if attempt == 0 and rank == kill_at % 2 and step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1:
            time.sleep(0.1)  # The ranks ask each other twice a second.
        if attempt == 1 and rank == 1 and step == signal_at:
            os.kill(os.getpid(), number)  # On one rank; all make one backup.


def train(*callbacks, is_real=True):
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = keras.Input((4,))
        outputs = keras.layers.Dropout(0.2, seed=1)(keras.layers.Dense(8, "tanh")(inputs))
        model = Seen(inputs, keras.layers.Dense(1, "sigmoid")(outputs))
        model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    model.rows = tf.Variable(tf.zeros([8], tf.int64), shape=[None], trainable=False)
    shuffled = data.shuffle(len(x)).batch(8)
    history = model.fit(shuffled, epochs=3, verbose=0, callbacks=[*callbacks, Fate(is_real)])
    return [keras.ops.convert_to_numpy(v) for v in (*model.weights, *model.optimizer.variables)], history.history


if attempt == 0:
    expected, history = train(is_real=False)
    if rank == 0:
        np.savez(here / "partial.npz", *expected)
        (here / "partial.npz").rename(here / "expected.npz")
        (here / "history.json").write_text(json.dumps(history))
    print("reference", flush=True)
found, history = train(BackupAndResume(here / "backup", save_freq=5))
with np.load(here / "expected.npz") as expected:
    for i, value in enumerate(found):
        np.testing.assert_array_equal(value, expected[f"arr_{i}"])
assert history == json.loads((here / "history.json").read_text()), history
(here / f"same.{rank}").touch()
"""


@pytest.mark.parametrize(
    ("engine", "number"),
    [
        ("multiworker", signal.SIGUSR1),
        pytest.param("horovod", signal.SIGTERM, marks=[pytest.mark.horovod, pytest.mark.thorough]),
    ],
)
def test_killed_and_signalled_jobs_resume(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, engine: str, number: int
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    chosen = random.Random(seed)
    kill_at = chosen.randrange(6, 20)
    signal_at = kill_at + chosen.randrange(1, 8)
    print(f"seed {seed}: killed at step {kill_at}, signal {number} at step {signal_at}")
    words = [write_script(tmp_path, TRAIN), engine, str(kill_at), str(int(number)), str(signal_at)]
    with start_ranks(request.getfixturevalue, engine, ["--max-restarts", "2", *words], tmp_path, 2) as running:
        ended = running.end(420)
        assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
        assert running.left() == []
    assert (tmp_path / "same.0").exists() and (tmp_path / "same.1").exists()
    assert not (tmp_path / "backup").exists()
    runs = [[_steps(tmp_path / f"steps.{attempt}.{rank}") for rank in (0, 1)] for attempt in range(3)]
    firsts = [[min(run) for run in both] for both in runs]
    lasts = [[max(run) for run in both] for both in runs]
    # After the kill: the step after the last backup, with a backup every five steps.
    assert firsts[1] == [kill_at // 5 * 5] * 2, (firsts, lasts)
    # After the signal: no step is lost or repeated.
    assert lasts[1][0] == lasts[1][1] >= signal_at
    assert firsts[2] == [lasts[1][0] + 1] * 2, (firsts, lasts)
    assert lasts[2] == [STEPS - 1] * 2
    _require_each_row_once(runs)


def _steps(path: pathlib.Path) -> dict[int, list[int]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({step for step, _ in lines}) == len(lines)
    return dict(lines)


def _require_each_row_once(runs: list[list[dict[int, list[int]]]]) -> None:
    """Returns each step as its last run computed it."""
    seen = collections.Counter[tuple[int, int]]()
    for rank in (0, 1):
        done: dict[int, list[int]] = {}
        for run in runs:
            done.update(run[rank])
        assert sorted(done) == list(range(STEPS))
        seen.update((step // EPOCH, row) for step, rows in done.items() for row in rows)
    assert seen == {(epoch, row): 1 for epoch in range(3) for row in range(8 * EPOCH - 3)}
