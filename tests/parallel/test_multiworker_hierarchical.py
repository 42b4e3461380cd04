"""`multiworker` on several hosts: sums within each host, then between them; exactness, and what all ranks are told.

The ranks are on loopback, but say that they are on two hosts: two of them on one, the third on another. (For network
namespaces, in which ranks cannot share memory, see `benchmarks/hosts.py`.) Exactness: `tests/parity/test_two_hosts.py`.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from patience import longer
from worker_processes import workers

# TensorFlow, and ours over shared memory, take a silent task for lost after 10 s; the margin is for a busy machine.
GONE_WITHIN_S = 60.0

TWO_HOSTS = """
import json, os
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
from tfdistkit.collectives.shm import peers
peers.host_id = lambda: 1 + rank // 2
from tfdistkit.strategies.sync.transports import hierarchical
hierarchical.LARGE_BYTES = 1
import tfdistkit
"""

# The gradients have 4 MB: most of a step is in the sums.
TRAIN = """
strategy = tfdistkit.strategy("multiworker", communication="hierarchical", timeout_s=60)
assert strategy.hierarchical_sums is not None
import keras, numpy as np, time
with strategy.scope():
    model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
    model.compile("sgd", "mse")
class Tell(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        print("epoch", epoch, flush=True)
model.fit(np.ones((12, 1000)), np.ones((12, 1000)), batch_size=6, epochs=20000, verbose=0, callbacks=[Tell()])
"""


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param(1, signal.SIGKILL, id="second-of-a-host-killed"),
        pytest.param(0, signal.SIGKILL, id="chief-killed", marks=pytest.mark.thorough),
        pytest.param(2, signal.SIGKILL, id="other-host-killed", marks=pytest.mark.thorough),
        pytest.param(1, signal.SIGSTOP, id="second-of-a-host-stopped", marks=pytest.mark.thorough),
        pytest.param(0, signal.SIGSTOP, id="chief-stopped", marks=pytest.mark.thorough),
        pytest.param(2, signal.SIGSTOP, id="other-host-stopped", marks=pytest.mark.thorough),
    ],
)
def test_all_survivors_name_the_rank_that_is_gone(tmp_path: Path, victim: int, number: signal.Signals) -> None:
    with workers(TWO_HOSTS + TRAIN, tmp_path, 3) as ranks:
        lost = ranks[victim]
        survivors = [rank for rank in ranks if rank is not lost]
        for one in survivors:
            one.wait_for("epoch 2")
        start = time.monotonic()
        lost.process.send_signal(number)
        for one in survivors:
            assert one.end() == 1, one.printed
            assert f"Rank {victim} ({lost.address}) no longer takes part" in one.printed, one.printed
        assert time.monotonic() - start < longer(GONE_WITHIN_S)


def test_the_check_of_a_step_runs_the_same_sums_on_all_ranks(tmp_path: Path) -> None:
    # The trial step needs the sums of the metric, and not the rows of all ranks, of which the loss is computed.
    code = """
strategy = tfdistkit.strategy("multiworker", communication="hierarchical", timeout_s=20)
import keras, numpy as np
def scaled(y, predicted):
    return keras.ops.mean(keras.ops.square(y - predicted) + 0.1 * predicted)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", scaled, metrics=[scaled])
model.fit(np.ones((9, 6)), np.ones((9, 1)), batch_size=3, verbose=0)
"""
    with workers(TWO_HOSTS + code, tmp_path, 3) as ranks:
        for rank in ranks:
            assert rank.end() == 0, rank.printed


@pytest.mark.thorough
@pytest.mark.parametrize("absent", [1, 2])
def test_a_call_that_one_rank_leaves_out_ends_with_the_reason(tmp_path: Path, absent: int) -> None:
    code = """
strategy = tfdistkit.strategy("multiworker", communication="hierarchical", timeout_s=8)
import tensorflow as tf, time
total = lambda: strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([300, 300])))
assert (total().numpy() == 3).all()
if rank != ABSENT:
    tfdistkit.collectives.all_reduce(tf.ones([300, 300]))
time.sleep(60)
"""
    with workers(TWO_HOSTS + code.replace("ABSENT", str(absent)), tmp_path, 3) as ranks:
        start = time.monotonic()
        for one in ranks:
            if one.rank != absent:
                assert one.end() == 1, one.printed
                assert "did not join a collective operation within `timeout_s`" in one.printed, one.printed
        assert time.monotonic() - start < longer(GONE_WITHIN_S)
