"""A loss over the whole global batch trains several ranks as it trains one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from rank_jobs import RunRanks, runner

pytestmark = [pytest.mark.tensorflow, pytest.mark.slow]

# The recipe of docs/collectives.md: each replica's own rows against everybody's, by a loss of Keras.
TRAIN = """
    import sys, tfdistkit
    engine = sys.argv[1]
    strategy = tfdistkit.strategy(engine, devices=2) if engine == "mirrored" else tfdistkit.strategy(engine)
    import keras, numpy as np, tensorflow as tf
    from tfdistkit import collectives
    SETTINGS

    class Contrastive(keras.Model):
        def __init__(self):
            super().__init__()
            self.encoder = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)])
            self.cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def call(self, pair):
            return [keras.ops.normalize(self.encoder(view), axis=-1) for view in pair]

        def train_step(self, data):
            pair, index = data
            with tf.GradientTape() as tape:
                left, right = self(pair, training=True)
                everybodys = collectives.all_gather(right)
                indices = collectives.all_gather(index)
                own = tf.argmax(index[:, None] == indices[None], axis=1)
                LOSS
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"contrastive": shown}  # Not "loss", which is what `compile(loss=...)` tracks.

    numbers = np.random.default_rng(3)
    x = numbers.normal(size=(ROWS, 6)).astype("float32")
    noisy = x + 0.1 * numbers.normal(size=x.shape).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Contrastive()
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), **COMPILE)
    data = tf.data.Dataset.from_tensor_slices(((x, noisy), np.arange(ROWS, dtype="int32"))).batch(16)
    history = model.fit(data, epochs=4, verbose=0)
    weights = [w.numpy() for w in model.trainable_variables]
    if tfdistkit.is_chief():
        np.savez("result.npz", *weights, loss=history.history["contrastive"])
"""


OF_KERAS = """
                loss = shown = self.cross_entropy(own, left @ tf.transpose(everybodys) / 0.1)
"""
OF_ONES_OWN = """
                logits = left @ tf.transpose(everybodys) / 0.1
                per_row = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits)
                loss = tf.reduce_sum(per_row) / tf.cast(tf.shape(indices)[0], tf.float32)
                shown = loss * tf.distribute.get_strategy().num_replicas_in_sync
"""
OF_EVERYTHING = """
                logits = collectives.all_gather(left) @ tf.transpose(everybodys) / 0.1
                every = tf.range(tf.shape(logits)[0])
                shown = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=every, logits=logits))
                loss = shown / tf.distribute.get_strategy().num_replicas_in_sync
"""

UNEVEN = 39  # Batches of 16, 16, 7: on two replicas the last are 4 and 3.
EVEN = 48


@pytest.fixture
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    return runner(request)


def train(
    run_ranks: RunRanks,
    engine: str,
    folder: Path,
    world_size: int,
    rows: int = UNEVEN,
    settings: str = "",
    compiled: str = "{}",
    loss: str = OF_KERAS,
) -> list[np.ndarray]:
    code = TRAIN.replace("SETTINGS", settings).replace("COMPILE", compiled).replace("ROWS", str(rows))
    code = code.replace("LOSS", loss.strip())
    run_ranks(engine, code, folder, world_size)
    with np.load(folder / "result.npz") as result:
        return [result[name] for name in sorted(result.files)]


@pytest.fixture(scope="module")
def of_one_process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[np.ndarray]]:
    run, folder = runner(request), tmp_path_factory.mktemp
    results = {rows: train(run, "one_device", folder("one"), 1, rows) for rows in (UNEVEN, EVEN)}
    for *_, loss in results.values():
        assert loss[-1] < 0.5 * loss[0], "it did not learn anything, so it shows nothing"
    return results


IN_LOOP, EAGER = "{'steps_per_execution': 3}", "{'run_eagerly': True}"


@pytest.mark.parametrize(
    ("engine", "compiled", "rows"),
    [
        ("multiworker", "{}", UNEVEN),
        # TensorFlow's collectives in a loop have to have one shape in all iterations.
        ("multiworker", IN_LOOP, EVEN),
        ("multiworker", EAGER, UNEVEN),
        ("mirrored", "{}", UNEVEN),
        ("mirrored", IN_LOOP, EVEN),
        ("mirrored", EAGER, UNEVEN),
        pytest.param("horovod", "{}", UNEVEN, marks=pytest.mark.horovod),
        pytest.param("horovod", IN_LOOP, UNEVEN, marks=pytest.mark.horovod),
    ],
)
def test_contrastive_training_is_exact(
    run_ranks: RunRanks,
    engine: str,
    compiled: str,
    rows: int,
    tmp_path: Path,
    of_one_process: dict[int, list[np.ndarray]],
) -> None:
    result = train(run_ranks, engine, tmp_path, 1 if engine == "mirrored" else 2, rows, compiled=compiled)
    for got, expected in zip(result, of_one_process[rows], strict=True):
        # With several steps in one execution Keras tells the loss of the last of them alone.
        if expected is not of_one_process[rows][-1] or compiled != IN_LOOP:
            assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("loss", [OF_ONES_OWN, OF_EVERYTHING], ids=["own rows", "all rows"])
def test_other_ways_to_weigh_are_exact_too(
    run_ranks: RunRanks, loss: str, tmp_path: Path, of_one_process: dict[int, list[np.ndarray]]
) -> None:
    result = train(run_ranks, "multiworker", tmp_path, 2, loss=loss)
    for got, expected in zip(result, of_one_process[UNEVEN], strict=True):
        assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


def test_without_the_gather_it_would_be_another_loss(
    run_ranks: RunRanks, tmp_path: Path, of_one_process: dict[int, list[np.ndarray]]
) -> None:
    result = train(run_ranks, "multiworker", tmp_path, 2, settings="collectives.all_gather = lambda tensor: tensor")
    assert np.abs(result[-1] - of_one_process[UNEVEN][-1]).max() > 1e-2
