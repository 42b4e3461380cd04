"""What goes wrong in a training under SLURM: it ends in time, the cause is named, and nothing is left on any node."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from equal_training import ENVIRONMENT
from patience import longer
from slurm_cluster import SlurmCluster, wait_until
from slurm_jobs import started

from tfdistkit.report import read_events

# TensorFlow sees a silent rank after 10 s, and SLURM a dead node after SlurmdTimeout, 10 s here, or somewhat more.
DEADLINE_S = 100

TRAIN = """
    import numpy as np
    import keras, tfdistkit
    strategy = tfdistkit.strategy("multiworker")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    for epoch in range(100_000):
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
        if epoch == 2:
            print("at work", flush=True)
"""


SLEEP = """
    import time
    print("at work", flush=True)
    time.sleep(600)
"""


@pytest.mark.tensorflow
def test_a_rank_that_is_stopped_and_a_node_that_is_gone(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Two jobs at the same time, as both are waited for."""
    stopped, gone = tmp_path / "stopped", tmp_path / "gone"
    for folder in (stopped, gone):
        folder.mkdir()
    options = ("--nnodes", "2", "-np", "2", "--log-dir", "logs")
    with (
        started(slurm, stopped, TRAIN, *options, **ENVIRONMENT) as training,
        started(slurm, gone, SLEEP, *options, nodes="n3,n10") as sleeping,
    ):
        sleeping.wait_for("1: at work")
        slurm.nodes["n10"].power_off()
        training.wait_for("0: at work", DEADLINE_S)
        os.kill(int((stopped / "logs" / "rank.1" / "pid").read_text()), signal.SIGSTOP)
        since = time.monotonic()
        try:
            assert training.end(DEADLINE_S) == 1, training.told
            assert sleeping.end(DEADLINE_S) == 1, sleeping.told
            took_s = time.monotonic() - since
        finally:
            slurm.start_node("n10")
            slurm.wait_for_nodes()
        assert took_s < longer(DEADLINE_S)
    assert "the first failure was\nrank 0 raised" in training.told
    assert "Rank 1 (n2:" in training.told and "no longer takes part" in training.told
    # Woken up to be ended, it may be quick enough to say that it was left alone.
    assert "Stopped because of it: rank 1." in training.told or "Later, rank 1 raised" in training.told
    assert "SLURM says NODE_FAIL (NodeDown), with exit code 1." in sleeping.told
    assert "Node failure on n10" in sleeping.told


PRINTS = """
    import os, pathlib, sys, time
    for _ in range(3000):
        print("x" * 1000)
    sys.stdout.flush()
    pathlib.Path("up").touch()
    while not pathlib.Path("fail").exists():
        time.sleep(0.05)
    os._exit(9)
"""


def test_a_job_with_unread_output(slurm: SlurmCluster, tmp_path: Path) -> None:
    """It fails, and the launcher says so with its exit code; what is read afterwards says how much is missing."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PRINTS))
    os.mkfifo(tmp_path / "output")
    reader = os.open(tmp_path / "output", os.O_RDONLY | os.O_NONBLOCK)
    words = [sys.executable, "-m", "tfdistkit", "run", "--backend", "slurm", "--sbatch-arg=--nodelist=n1"]
    words += ["--sbatch-arg=--job-name=stuck", "-np", "1", "--log-dir", "logs", "train.py"]
    process = slurm.start(*words, cwd=tmp_path, log=tmp_path / "output")
    try:
        wait_until((tmp_path / "up").exists, "all that the job prints")
        (tmp_path / "fail").touch()
        wait_until(lambda: read_events(tmp_path / "logs")[-1]["event"] == "job_ended", "the end of the job")
        os.set_blocking(reader, True)
        told = b""
        while data := os.read(reader, 1 << 16):
            told += data
        assert process.wait(timeout=DEADLINE_S) == 9
        assert b" bytes of the workers' last output are not shown" in told[-5000:]
        assert (tmp_path / "logs/log").stat().st_size > 3_000_000
    finally:
        slurm.run("scancel", "--signal=KILL", "--full", "--name=stuck")
        process.kill()
        process.wait(timeout=60)
        os.close(reader)
