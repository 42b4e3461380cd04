"""A loss over the whole global batch trains several ranks exactly like one process."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from shared_jobs import STRATEGY, SharedJobs

pytestmark = pytest.mark.tensorflow

# The recipe of docs/collectives.md: each replica's own rows against the rows of all replicas, by a Keras loss.
TRAIN = """
    import json
    import keras, numpy as np, tensorflow as tf
    from tfdistkit import collectives

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
                everybodys = GATHER(right)
                indices = GATHER(index)
                own = tf.argmax(index[:, None] == indices[None], axis=1)
                LOSS
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"contrastive": shown}  # Not "loss", which is what `compile(loss=...)` tracks.

    numbers = np.random.default_rng(3)
    x = numbers.normal(size=(ROWS, 6)).astype("float32")
    noisy = x + 0.1 * numbers.normal(size=x.shape).astype("float32")
    keras.utils.set_random_seed(1)
    strategy.check_step = "GATHER" != "tf.identity"  # It would refuse the step that gathers nothing.
    with strategy.scope():
        model = Contrastive()
        model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5), **COMPILE)
    data = tf.data.Dataset.from_tensor_slices(((x, noisy), np.arange(ROWS, dtype="int32"))).batch(16)
    history = model.fit(data, epochs=4, verbose=0)
    weights = [w.numpy() for w in model.trainable_variables]
    print(json.dumps([w.tolist() for w in [*weights, np.asarray(history.history["contrastive"])]]))
"""


OF_KERAS = """
                loss = shown = self.cross_entropy(own, left @ tf.transpose(everybodys) / 0.1)
"""
OF_ONES_OWN = """
                logits = left @ tf.transpose(everybodys) / 0.1
                per_row = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=own, logits=logits)
                loss = shown = tf.reduce_mean(per_row)
"""
OF_EVERYTHING = """
                logits = collectives.all_gather(left) @ tf.transpose(everybodys) / 0.1
                every = tf.range(tf.shape(logits)[0])
                loss = shown = tf.reduce_mean(
                    tf.nn.sparse_softmax_cross_entropy_with_logits(labels=every, logits=logits))
"""

UNEVEN = 39  # Batches of 16, 16, 7: on two replicas the last are 4 and 3.
EVEN = 48


# Code of all jobs: several ranks, and one process with one or two replicas.
SETUPS = {
    "mirrored": "import tfdistkit\nstrategy = tfdistkit.strategy('mirrored', devices=2)",
    "one_device": "import tfdistkit\nstrategy = tfdistkit.strategy('one_device')",
}
IN_LOOP, EAGER = "{'steps_per_execution': 3}", "{'run_eagerly': True}"


def part(
    engine: str, rows: int = UNEVEN, compiled: str = "{}", loss: str = OF_KERAS, gather: str = "collectives.all_gather"
) -> pytest.MarkDecorator:
    code = TRAIN.replace("COMPILE", compiled).replace("ROWS", str(rows)).replace("GATHER", gather)
    return pytest.mark.part(code.replace("LOSS", loss.strip()), setup=SETUPS.get(engine, STRATEGY))


def results(text: str) -> list[np.ndarray]:
    """Returns the weights, and the loss of each epoch."""
    return [np.asarray(values) for values in json.loads(text.splitlines()[-1])]


@pytest.fixture
def of_one_process(shared_jobs: SharedJobs, rows: int) -> list[np.ndarray]:
    for needed in (UNEVEN, EVEN):
        shared_jobs.add(part("one_device", needed).mark, "one_device", 1)
    [text] = shared_jobs.part(part("one_device", rows).mark, "one_device", 1).printed()
    *weights, loss = results(text)
    assert loss[-1] < 0.5 * loss[0], "it did not learn anything, so it shows nothing"
    return [*weights, loss]


@pytest.fixture
def rows() -> int:
    return UNEVEN


def assert_equal(printed: list[str], expected: list[np.ndarray], is_in_loop: bool = False) -> None:
    # With several steps in one execution Keras logs the loss of the last step only.
    compared = slice(-1 if is_in_loop else None)
    for text in printed:
        for got, wanted in zip(results(text)[compared], expected[compared], strict=True):
            assert np.abs(got - wanted).max() <= 1e-6 * np.abs(wanted).max()


def case(engine: str, compiled: str, rows: int, *more: Any) -> Any:
    marks = [part(engine, rows, compiled), *([pytest.mark.horovod] if engine.startswith("horovod") else []), *more]
    return pytest.param(engine, 1 if engine == "mirrored" else 2, compiled, rows, marks=marks)


@pytest.mark.parametrize(
    ("engine", "world_size", "compiled", "rows"),
    [
        case("multiworker", "{}", UNEVEN),
        # TensorFlow's collectives in a loop need one shape in all iterations.
        case("multiworker", IN_LOOP, EVEN),
        case("multiworker", EAGER, UNEVEN),
        case("mirrored", "{}", UNEVEN, pytest.mark.thorough),
        case("mirrored", IN_LOOP, EVEN),
        case("mirrored", EAGER, UNEVEN),
        case("horovod", "{}", UNEVEN, pytest.mark.thorough),
        case("horovod", IN_LOOP, UNEVEN),
        case("horovod_mpi", IN_LOOP, UNEVEN, pytest.mark.thorough),
    ],
)
def test_contrastive_training_is_exact(printed: list[str], compiled: str, of_one_process: list[np.ndarray]) -> None:
    assert_equal(printed, of_one_process, compiled == IN_LOOP)


OTHER_LOSSES = {"own rows": OF_ONES_OWN, "all rows": OF_EVERYTHING}


@pytest.mark.parametrize(
    "engine",
    [pytest.param("multiworker", id=name, marks=part("multiworker", loss=loss)) for name, loss in OTHER_LOSSES.items()],
)
def test_other_weights_are_exact(printed: list[str], of_one_process: list[np.ndarray]) -> None:
    assert_equal(printed, of_one_process)


@part("multiworker", gather="tf.identity")
@pytest.mark.parametrize("engine", ["multiworker"])
def test_the_loss_without_the_gather_differs(printed: list[str], of_one_process: list[np.ndarray]) -> None:
    assert np.abs(results(printed[0])[-1] - of_one_process[-1]).max() > 1e-2
