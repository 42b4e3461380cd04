"""`multiworker` when a worker dies, stops, is missing or runs other steps: an error that names it, and an exit."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest
from patience import longer
from worker_processes import workers

pytestmark = pytest.mark.usefixtures("whole_exit")

# TensorFlow, and ours over shared memory, take a silent task for lost after 10 s; the margin is for a busy machine.
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


@pytest.mark.parametrize(
    ("communication", "victim", "number"),
    [
        pytest.param("shm", 1, signal.SIGKILL, id="worker-killed"),
        pytest.param("shm", 0, signal.SIGKILL, id="chief-killed"),
        pytest.param("shm", 1, signal.SIGSTOP, id="worker-stopped"),
        pytest.param("shm", 0, signal.SIGSTOP, id="chief-stopped"),
        pytest.param("ring", 1, signal.SIGKILL, id="ring-worker-killed"),
        pytest.param("ring", 0, signal.SIGSTOP, id="ring-chief-stopped"),
    ],
)
def test_the_survivor_names_the_rank_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, communication: str, victim: int, number: signal.Signals
) -> None:
    monkeypatch.setenv("TFDISTKIT_COMMUNICATION", communication)
    with workers(TRAIN_SLOWLY, tmp_path) as ranks:
        lost, survivor = ranks[victim], ranks[1 - victim]
        survivor.wait_for("epoch 2")
        start = time.monotonic()
        lost.process.send_signal(number)
        assert survivor.end() == 1
        assert time.monotonic() - start < longer(GONE_WITHIN_S)
        assert f"Rank {victim} ({lost.address}) no longer takes part" in survivor.printed


@pytest.mark.parametrize("communication", ["shm", "ring"])
def test_sigterm_ends_a_rank_as_it_ends_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, communication: str
) -> None:
    monkeypatch.setenv("TFDISTKIT_COMMUNICATION", communication)
    with workers(TRAIN_SLOWLY, tmp_path) as ranks:
        for rank in ranks:
            rank.wait_for("epoch 2")
        for rank in ranks:
            rank.process.terminate()
        assert [rank.end() for rank in ranks] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("here", [0, 1])
def test_a_missing_rank_is_named_within_the_timeout(tmp_path: Path, here: int) -> None:
    code = 'import tfdistkit; tfdistkit.strategy("multiworker", timeout_s=5)'
    with workers(code, tmp_path, start=(here,)) as (alone,):
        assert alone.end() == 1
        assert "RendezvousError" in alone.printed
        missing = "Rank 0 at" if here else "rank 1 ("
        assert missing in alone.printed


@pytest.mark.parametrize("communication", ["shm", "ring"])
def test_a_call_on_only_one_rank_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, communication: str
) -> None:
    monkeypatch.setenv("TFDISTKIT_COMMUNICATION", communication)
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
        assert "DeadlineExceededError" in chief.printed
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


@pytest.mark.parametrize(
    ("option", "given", "told"),
    (
        ("communication", '["shm", "ring"]', "rank 0: 'shm'; rank 1: 'ring'"),
        ("compression", '["fp16", "none"]', "rank 0: 'FP16'; rank 1: 'Average'"),
        ("fusion_bytes", "[1, 2]", "rank 0: '1'; rank 1: '2'"),
        ("algorithm", "[tfdistkit.algorithms.LocalSGD(every) for every in (5, 6)]", "every=6, warmup_steps=0"),
        ("compression", "[c.ByteGrad(), c.ByteGrad(64)]", "(block=512, min_size=0)'; rank 1: 'ByteGrad(block=64"),
    ),
)
def test_other_options_on_other_ranks_are_an_error_on_both(option: str, given: str, told: str, tmp_path: Path) -> None:
    code = """
        import json, os
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        import tfdistkit
        from tfdistkit import compression as c
        tfdistkit.strategy("multiworker", timeout_s=20, OPTION=GIVEN[rank])
    """
    with workers(code.replace("OPTION", option).replace("GIVEN", given), tmp_path) as ranks:
        for rank in ranks:
            assert rank.end() == 1
            assert re.search(f"OptionError: [^\n]*`{option}`[^\n]* must be the same on all ranks", rank.printed)
            assert told in rank.printed


def test_hosts_without_common_memory_take_the_ring_or_are_told(tmp_path: Path) -> None:
    # As on two hosts: the ranks are on loopback, but say that they are not.
    code = """
        import json, os, sys
        rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        from tfdistkit.collectives.shm import peers
        peers.host_id = lambda: rank + 1
        import tfdistkit
        try:
            tfdistkit.strategy("multiworker", timeout_s=20, communication="shm")
        except tfdistkit.errors.ClusterConfigError as error:
            print(error)
        strategy = tfdistkit.strategy("multiworker", timeout_s=20)
        print(type(strategy.extended).__name__, strategy.transport)
        print(tfdistkit.collectives.all_reduce(rank + 1).numpy())
    """
    with workers(code, tmp_path) as ranks:
        for rank in ranks:
            assert rank.end() == 0, rank.printed
            assert '`communication="shm"` needs all ranks on one Linux host' in rank.printed
            assert "rank 0 and rank 1 apart" in rank.printed
            assert "MultiWorkerExtended None" in rank.printed and "\n3\n" in rank.printed
