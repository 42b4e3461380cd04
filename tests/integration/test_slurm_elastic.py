"""`--nnodes MIN:MAX` on a real SLURM: a job that loses a node continues on those that are left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from equal_training import ENVIRONMENT
from slurm_cluster import SlurmCluster
from slurm_jobs import started

# SLURM takes a silent node for dead after 10 s here or somewhat more, and waits before it starts a job again.
DEADLINE_S = 180

TRAIN = """
    import os, time
    import numpy as np
    import keras, tfdistkit
    strategy = tfdistkit.strategy("multiworker")
    numbers = np.random.default_rng(1)
    x, y = (numbers.normal(size=(48, width)).astype("float32") for width in (5, 1))
    has_lost_a_node = "SLURM_RESTART_COUNT" in os.environ
    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = int(self.model.optimizer.iterations)
            # A variable of the script that a callback changes would be in the backup.
            os.environ.setdefault("FIRST_STEP", str(step))
            if step == 20 and tfdistkit.rank() == 0:
                print("at step 20", flush=True)
            time.sleep(0 if has_lost_a_node or step < 20 else 0.5)

    def train(*callbacks):
        keras.utils.set_random_seed(7)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(x, y, batch_size=12, epochs=60, verbose=0, callbacks=list(callbacks))
        return model.get_weights()

    weights = train(Slow(), tfdistkit.callbacks.BackupAndResume("backup", save_freq=5))
    without_a_loss = train(tfdistkit.callbacks.BackupAndResume("another backup"))
    close = all(np.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(weights, without_a_loss))
    first = os.environ["FIRST_STEP"]
    told = f"RESULT workers {tfdistkit.world_size()}, begins at step {first}, the weights without a loss: {close}"
    os.write(1, (told + chr(10)).encode())
"""


@pytest.mark.tensorflow
@pytest.mark.timeout(480)
def test_a_job_continues_on_the_nodes_that_are_left(slurm: SlurmCluster, tmp_path: Path) -> None:
    options = ("--nnodes", "2:3", "--nproc-per-node", "1", "--sbatch-arg=--exclude=n3")
    with started(slurm, tmp_path, TRAIN, *options, nodes=None, **ENVIRONMENT) as run:
        run.wait_for("0: at step 20", DEADLINE_S)
        assert slurm.job(run.number)["NumNodes"] == "3"
        slurm.nodes["n10"].power_off()
        try:
            assert run.end(DEADLINE_S) == 0, run.told
        finally:
            slurm.start_node("n10")
            slurm.wait_for_nodes()
        job = slurm.job(run.number)
        assert (job["Restarts"], job["NumNodes"]) == ("1", "2")
    results = re.findall("RESULT workers (.*), begins at step (.*), the weights without a loss: (.*)", run.told)
    assert len(results) == 2 and len(set(results)) == 1, run.told
    workers, begins, close = results[0]
    assert workers == "2" and int(begins) > 10 and close == "True", run.told  # It lost at most one interval.
