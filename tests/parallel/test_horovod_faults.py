"""`horovod` when a rank dies, stops or is cut off during training: each survivor raises an error and exits."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from gloo_ranks import Host, cut_link, gloo_ranks, two_hosts, why_no_namespaces

pytestmark = [pytest.mark.tensorflow, pytest.mark.horovod, pytest.mark.usefixtures("whole_exit")]

# Horovod's timeout for a silent rank, and a margin.
TIMEOUT_S, MORE_S = 5, 10

TRAIN_SLOWLY = f"""
    import tfdistkit
    strategy = tfdistkit.strategy("horovod", timeout_s={TIMEOUT_S})
    import keras, numpy as np, time
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            print("epoch", epoch, flush=True)
            time.sleep(0.1)
    model.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=20_000, verbose=0, callbacks=[Tell()])
"""
HERE = (Host(), Host())


@pytest.mark.parametrize(
    ("number", "victim", "within_s"),
    [(signal.SIGKILL, 0, MORE_S), (signal.SIGSTOP, 1, TIMEOUT_S + MORE_S)],
    ids=["chief killed", "stopped"],
)
def test_the_survivor_names_the_rank_that_is_gone(
    tmp_path: Path, horovod_path: Path, number: signal.Signals, victim: int, within_s: float
) -> None:
    with gloo_ranks(TRAIN_SLOWLY, tmp_path, horovod_path, HERE) as ranks:
        lost, survivor = ranks[victim], ranks[1 - victim]
        survivor.wait_for("epoch 2")
        lost.process.send_signal(number)
        assert survivor.seconds_to_end(time.monotonic()) < within_s
        assert f"Rank {victim} no longer takes part, so the others cannot go on." in survivor.printed
        lost.process.kill()
        lost.process.wait(timeout=30)


@pytest.fixture
def hosts() -> tuple[Host, Host]:
    reason = why_no_namespaces()
    if reason and os.environ.get("TFDISTKIT_REQUIRE_HOROVOD") == "1":
        pytest.fail(f"A cut link is not tested: {reason}.", pytrace=False)
    if reason:
        pytest.skip(f"A cut link is not tested: {reason}")
    with two_hosts() as made:
        yield made


def test_both_sides_of_a_cut_link_end(tmp_path: Path, horovod_path: Path, hosts: tuple[Host, Host]) -> None:
    with gloo_ranks(TRAIN_SLOWLY, tmp_path, horovod_path, hosts) as ranks:
        ranks[0].wait_for("epoch 2")
        cut_link(hosts[1])
        cut = time.monotonic()
        for rank in ranks:
            assert rank.seconds_to_end(cut) < TIMEOUT_S + MORE_S
            assert f"Rank {1 - rank.rank} no longer takes part, so the others cannot go on." in rank.printed
