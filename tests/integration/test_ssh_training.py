"""Training on two hosts by ssh gives what a single process gives, with TensorFlow and Horovod; a cut link ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from net_hosts import LOGIN, NetHosts
from ssh_jobs import PATHS, run_on_hosts, ssh_job

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(900)]

# Two processes on hosts of their own load TensorFlow on a busy machine.
DEADLINE_S = 240.0

TRAIN = """
    import json, sys, time
    import numpy as np
    import tfdistkit
    from tfdistkit.strategies.sync.transports import hierarchical
    hierarchical.LARGE_BYTES = 1
    strategy = tfdistkit.strategy(sys.argv[1])
    import keras
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(30, 5)).astype("float32"), rng.normal(size=(30, 1)).astype("float32")
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs):
            print("epoch", epoch, flush=True)
            time.sleep(0.05)
    epochs = int(sys.argv[2])
    history = model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[Tell()])
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()]).tolist()
    found = {"loss": history.history["loss"], "weights": weights, "ranks": tfdistkit.world_size(),
             "within hosts": getattr(strategy, "hierarchical_sums", None) is not None}
    print(json.dumps(found), flush=True)
"""
QUIET = ["-x", "CUDA_VISIBLE_DEVICES=-1", "-x", "TF_CPP_MIN_LOG_LEVEL=3", "--threads-per-worker", "1"]
STARTS_LATE = ["--start-timeout", "120"]


def results(stdout: str) -> list[dict]:
    return [json.loads(line[line.index("{") :]) for line in stdout.splitlines() if '{"loss"' in line]


@pytest.fixture(autouse=True)
def clean(hosts: NetHosts) -> Iterator[None]:
    yield
    hosts.clean()


@pytest.fixture(scope="module")
def alone(hosts: NetHosts) -> dict:
    """What a single process gives."""
    script = hosts.disk(LOGIN) / "alone.py"
    hosts.write("alone.py", TRAIN, LOGIN)
    quiet = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(script), "one_device", "3"]
    said = subprocess.run(command, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=DEADLINE_S)
    (result,) = results(said.stdout)
    return result


@pytest.mark.parametrize(
    ("backend", "strategy", "names", "ranks"),
    [
        pytest.param("local", "multiworker", "h1,h2", 2, id="multiworker"),
        pytest.param("local", "multiworker", "h1:2,h2", 3, id="two-workers-of-a-host"),
        pytest.param("horovod", "horovod", "h1,h2", 2, marks=pytest.mark.horovod, id="horovod"),
    ],
)
def test_two_hosts_train_as_one_process(
    hosts: NetHosts, alone: dict, request: pytest.FixtureRequest, backend: str, strategy: str, names: str, ranks: int
) -> None:
    horovod = [str(request.getfixturevalue("horovod_path"))] if backend == "horovod" else []
    path = os.pathsep.join([*horovod, *filter(None, [PATHS])])
    script = str(hosts.write("train.py", TRAIN))
    words = ["-H", names, "--backend", backend, "-x", f"PYTHONPATH={path}", *QUIET, *STARTS_LATE]
    ended = run_on_hosts(hosts, *words, script, strategy, "3", deadline_s=DEADLINE_S)
    assert ended.code == 0, ended.stderr
    found = results(ended.stdout)
    assert [one["ranks"] for one in found] == [ranks] * ranks
    for one in found:
        assert one["within hosts"] == (ranks == 3)
        assert one["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert one["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-6)


def test_a_link_that_is_cut_in_training_is_the_cause(hosts: NetHosts) -> None:
    """TensorFlow complains on both sides; what is told is the host that was lost."""
    script = str(hosts.write("train.py", TRAIN))
    with ssh_job(hosts, "-H", "h1,h2", *QUIET, *STARTS_LATE, script, "multiworker", "100000") as running:
        running.wait_for("[0] epoch 2", "[1] epoch 2", deadline_s=DEADLINE_S)
        hosts.pull_cable(2)
        try:
            ended = running.end(deadline_s=60)
            assert ended.code != 0
            report = ended.stderr[ended.stderr.index("tfdistkit: the job failed") :]
            assert "the first failure was\nrank 1 was lost with its host h2" in report, report
            running.nothing_is_left(numbers=(LOGIN, 1))
        finally:
            hosts.plug_cable(2)
        running.nothing_is_left(deadline_s=40, numbers=(2,))
