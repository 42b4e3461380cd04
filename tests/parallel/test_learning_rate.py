"""`LearningRateWarmup` and `LearningRateScale` with two replicas, against one process with the same rates."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_jobs import OVER_ONE
from worker_processes import run_workers

pytestmark = pytest.mark.tensorflow

# Both replicas in one process.
MIRRORED = """
    import tfdistkit
    strategy, engine = tfdistkit.strategy("mirrored", devices=2), "mirrored"
"""

TRAIN = """
    import keras, numpy as np, tensorflow as tf
    from tfdistkit.callbacks import LearningRateScale, LearningRateWarmup
    x = np.random.default_rng(0).normal(size=(56, 4)).astype("float32")
    y = x[:, :1] * 2
    schedules = keras.optimizers.schedules
    optimizers = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)),
        "adamw": lambda: keras.optimizers.AdamW(0.05),
        "schedule": lambda: keras.optimizers.SGD(schedules.CosineDecay(0.05, 30), momentum=0.9),
    }

    def train(scope, optimizer, callbacks, steps_per_execution=1):
        keras.utils.set_random_seed(0)
        rates = []
        class Seen(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
        with scope.scope():
            layers = [keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(optimizers[optimizer](), "mse", steps_per_execution=steps_per_execution)
        history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[*callbacks, Seen()])
        return rates, history.history, [np.asarray(w) for w in model.get_weights()]

    alone = tf.distribute.get_strategy()
    for optimizer in optimizers:
        ours = lambda: [LearningRateWarmup(warmup_epochs=2), LearningRateScale("sqrt", start_epoch=3)]
        by_hand = lambda: [LearningRateWarmup(warmup_epochs=2, scale=lambda n: 2),
                           LearningRateScale(2**0.5, start_epoch=3)]
        rates, history, weights = train(strategy, optimizer, ours())
        expected_rates, expected_history, expected_weights = train(alone, optimizer, by_hand())
        assert rates == expected_rates, (optimizer, rates, expected_rates)
        assert len(set(rates)) > 10
        np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=2e-5)
        for one, other in zip(weights, expected_weights):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
        _, in_threes, again = train(strategy, optimizer, ours(), steps_per_execution=3)
        assert in_threes == history, (optimizer, in_threes, history)
        assert all((one == other).all() for one, other in zip(again, weights)), optimizer
        if engine != "mirrored":
            both = strategy.gather(tf.constant(np.concatenate([w.reshape(-1) for w in again])[None]), axis=0).numpy()
            assert (both == both[0]).all()
    # By Horovod's formula: from the rate of one worker to the scaled rate in the last step of the warm-up.
    rates = train(strategy, "sgd", [LearningRateWarmup(warmup_epochs=2)])[0]
    formula = [0.05 * 0.5 * (min(2.0, (step + 1) / 7) * (2 - 1) / 2 + 1) for step in range(28)]
    np.testing.assert_allclose(rates, formula, rtol=1e-6)
    print("same rates")
"""


@pytest.mark.part(TRAIN)
@pytest.mark.parametrize("engine", OVER_ONE)
def test_two_ranks_have_the_rates_of_one_process(printed: list[str]) -> None:
    assert printed == ["same rates\n"] * 2


def test_two_replicas_of_a_process_have_its_rates(tmp_path: Path) -> None:
    [printed] = run_workers(MIRRORED + TRAIN, tmp_path, world_size=1)
    assert "same rates" in printed
