"""`multiworker` when a worker dies, stops, is missing or runs other steps: an error that names it, and an exit."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from patience import longer
from worker_processes import workers

# TensorFlow declares a silent task dead after 10 s; the margin is for a busy machine.
GONE_WITHIN_S = 45.0

TRAIN_SLOWLY = """
    import tfdistkit
    strategy = tfdistkit.strategy("multiworker", timeout_s=60)
    import keras, numpy as np, time
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            print("epoch", epoch, flush=True)
            time.sleep(0.2)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=2000, verbose=0, callbacks=[Tell()])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", [1, 0], ids=["worker", "chief"])
def test_the_survivor_names_the_rank_that_is_gone(tmp_path: Path, victim: int, number: signal.Signals) -> None:
    with workers(TRAIN_SLOWLY, tmp_path) as ranks:
        lost, survivor = ranks[victim], ranks[1 - victim]
        survivor.wait_for("epoch 2")
        start = time.monotonic()
        lost.process.send_signal(number)
        assert survivor.end() == 1
        assert time.monotonic() - start < longer(GONE_WITHIN_S)
        assert f"Rank {victim} ({lost.address}) no longer takes part" in survivor.printed


@pytest.mark.parametrize("here", [0, 1])
def test_a_missing_rank_is_named_within_the_timeout(tmp_path: Path, here: int) -> None:
    code = 'import tfdistkit; tfdistkit.strategy("multiworker", timeout_s=5)'
    with workers(code, tmp_path, start=(here,)) as (alone,):
        assert alone.end() == 1
        assert "RendezvousError" in alone.printed
        missing = "Rank 0 at" if here else "rank 1 ("
        assert missing in alone.printed


def test_a_call_on_only_one_rank_ends_with_the_reason(tmp_path: Path) -> None:
    code = """
        import tfdistkit
        strategy = tfdistkit.strategy("multiworker", timeout_s=8)
        import keras, numpy as np, time
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        if tfdistkit.rank() == 0:
            model.evaluate(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
        else:
            time.sleep(60)
    """
    with workers(code, tmp_path) as (chief, _):
        assert chief.end() == 1
        assert "did not join a collective operation within `timeout_s`" in chief.printed
        assert "if rank == 0" in chief.printed


def test_different_world_sizes_are_an_error_before_tensorflow_starts(tmp_path: Path) -> None:
    # The cluster of rank 1 has a third worker.
    code = """
        import json, os
        config = json.loads(os.environ["TF_CONFIG"])
        if config["task"]["index"] == 1:
            config["cluster"]["worker"].append("127.0.0.1:9")
            os.environ["TF_CONFIG"] = json.dumps(config)
        import tfdistkit
        tfdistkit.strategy("multiworker", timeout_s=20)
    """
    with workers(code, tmp_path) as ranks:
        for rank in ranks:
            assert rank.end() == 1
            assert "ClusterConfigError" in rank.printed


def test_jit_compile_on_cpus_is_refused_before_training(tmp_path: Path) -> None:
    code = """
        import tfdistkit
        strategy = tfdistkit.strategy("multiworker", timeout_s=60)
        import keras, numpy as np
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=True)
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
    """
    with workers(code, tmp_path) as ranks:
        for rank in ranks:
            assert rank.end() == 1
            assert "UnsupportedError: `jit_compile=True`" in rank.printed
