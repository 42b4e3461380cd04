"""Jobs of parameter servers and of Horovod that hang: one job for each, whose attempts hang in different places."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from job_process import job, needs_mpirun, write_script
from test_run_hangs import WITH_TENSORFLOW

PARAMETER_SERVER = """
import json, os, pathlib, signal, sys, time
import tfdistkit
strategy = tfdistkit.strategy("parameter_server")
import keras, numpy as np, tensorflow as tf
run_dir, hang = pathlib.Path(os.environ["TFDISTKIT_RUN_DIR"]), sys.argv[1 + int(os.environ["TFDISTKIT_ATTEMPT"])]

class Hang(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hang == "callback":
            time.sleep(1000)
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        os.kill([one["pid"] for one in events if one.get("process") == "worker 1" and "pid" in one][-1], signal.SIGSTOP)

def dataset_fn(context):
    lines = tf.data.TextLineDataset(str(run_dir / "fifo"))
    return lines.map(lambda line: (tf.ones(4), tf.ones(1))).batch(8)

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones((64, 1)))).batch(8)
if hang == "data":
    os.mkfifo(run_dir / "fifo")
    data = strategy.distribute_datasets_from_function(dataset_fn)
model.fit(data, epochs=3, steps_per_epoch=8, verbose=0, callbacks=[Hang()])
"""

HOROVOD = """
import os, time
import tfdistkit
strategy = tfdistkit.strategy("horovod")
import horovod.tensorflow as hvd
import keras, numpy as np, tensorflow as tf
attempt = int(os.environ["TFDISTKIT_ATTEMPT"])

class Hang(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if tfdistkit.rank() == 1 and batch == 3 and attempt == 0:
            time.sleep(1000)
        if tfdistkit.rank() == 1 and batch == 3:
            hvd.allreduce(tf.ones(1), name="of rank 1 only")

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((128, 4)), np.ones((128, 1)))).batch(8)
model.fit(data, epochs=3, verbose=0, callbacks=[Hang()])
"""


SKIPPED = """
import os
import tfdistkit
strategy = tfdistkit.strategy("horovod")
import horovod.tensorflow as hvd
import keras, numpy as np, tensorflow as tf

class Model(keras.Sequential):
    def train_step(self, data):
        logs, one = super().train_step(data), tf.ones(1)
        is_fifth = self.optimizer.iterations == (5 if tfdistkit.rank() == 1 else -1)
        return {**logs, "extra": tf.cond(is_fifth, lambda: hvd.allreduce(one, name="extra"), lambda: one)}

with strategy.scope():
    model = Model([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((128, 4)), np.ones((128, 1)))).batch(8)
model.fit(data, epochs=3, verbose=0)
"""


def reports(folder: Path, script: str, *words: str, hangs: tuple[str, ...] = (), **variables: str) -> list[str]:
    """Runs a job to its end, and returns the reports of its attempts, each of which hangs."""
    words = ("--hang-timeout", "4", *words, write_script(folder, script), *hangs)
    with job(*words, cwd=folder, **WITH_TENSORFLOW, **variables) as running:
        ended = running.end(240)
        assert running.left() == []
    assert ended.code == 1, ended.stderr
    return ended.stderr.split("no rank made progress")[1:]


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_parameter_servers(tmp_path: Path) -> None:
    words = ("--ps", "1", "-np", "2", "--log-dir", "logs", "--max-restarts", "1")
    callback, data = reports(tmp_path, PARAMETER_SERVER, *words, hangs=("callback", "data"))
    assert "chief is in script.py:11 on_epoch_end: callbacks after training step 8 (epoch 1)\n" in callback
    assert "worker 0, worker 1, ps 0 serve the coordinator\n" in callback
    assert "So worker 0, worker 1, ps 0 wait for chief.\n" in callback
    assert f"serves the coordinator, blocked in the kernel opening {tmp_path}/logs/fifo\n" in data
    assert "chief waits for a step of its workers, in script.py:26 <module>: training step 1 (epoch 1)\n" in data


@pytest.mark.thorough
@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_a_suspended_worker_of_a_coordinator(tmp_path: Path) -> None:
    (stopped,) = reports(tmp_path, PARAMETER_SERVER, "--ps", "1", "-np", "2", hangs=("stopped",))
    assert "worker 1 is suspended (SIGSTOP): serving the coordinator\n" in stopped
    assert "chief waits for a step of its workers, in script.py:26 <module>: " in stopped
    assert "So chief, worker 0, ps 0 wait for worker 1.\n" in stopped


def check_horovod(first: str, second: str) -> None:
    assert "rank 1 is in script.py:12 on_train_batch_end: callbacks after training step 4 (epoch 1)\n" in first
    assert "rank 0 waits, probably for the other ranks, in script.py:20 <module>: training step 5 (epoch 1)\n" in first
    assert "So rank 0 waits for rank 1.\n" in first
    assert "rank 0 waits, probably for the other ranks, in script.py:20 <module>: training step 5 (epoch 1)\n" in second
    assert "rank 1 waits in a collective, in script.py:14 on_train_batch_end: callbacks after training step 4" in second


@pytest.mark.tensorflow
@pytest.mark.horovod
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["horovod", pytest.param("mpi", marks=[pytest.mark.thorough, needs_mpirun])])
def test_horovod(tmp_path: Path, horovod_path: Path, backend: str) -> None:
    """Its threads poll for the peers all the time, which is no progress."""
    path = os.pathsep.join([str(horovod_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = ("--backend", backend, "-np", "2", "--max-restarts", "1")
    check_horovod(*reports(tmp_path, HOROVOD, *words, PYTHONPATH=path))


@pytest.mark.tensorflow
@pytest.mark.horovod
@pytest.mark.timeout(300)
def test_a_collective_of_a_compiled_step_that_one_rank_leaves_out(tmp_path: Path, horovod_path: Path) -> None:
    """The progress notes do not know it; Horovod tells it."""
    path = os.pathsep.join([str(horovod_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    (report,) = reports(tmp_path, SKIPPED, "--backend", "horovod", "-np", "2", PYTHONPATH=path)
    assert "ranks 0, 1 wait, probably for the other ranks, in script.py:18 <module>: training step 5 (epoch" in report
    assert "Horovod waits for rank 0 to call `extra` and rank 1 to call a collective of the strategy: one " in report
