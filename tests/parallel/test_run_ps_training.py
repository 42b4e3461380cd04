"""The launcher and `tfdistkit.strategy("parameter_server")`: training continues after the death of any process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_process import job, write_script

from tfdistkit.report import read_events

pytestmark = pytest.mark.usefixtures("whole_exit")

DEADLINE_S = 240.0
EPOCHS, STEPS = 5, 16

# In attempt 0 a worker is killed after epoch 1, and the server after epoch 3; attempt 1 goes on after the backup.
TRAIN = f"""
    import json, os, pathlib, signal, time
    import tfdistkit
    strategy = tfdistkit.strategy("parameter_server", heartbeat_timeout_s=10)
    # Only the coordinator comes here.
    import keras, numpy as np
    assert tfdistkit.is_chief() and tfdistkit.world_size() == 2
    run_dir, attempt = pathlib.Path(os.environ["TFDISTKIT_RUN_DIR"]), os.environ["TFDISTKIT_ATTEMPT"]

    def pids(name):
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        return [event["pid"] for event in events if "pid" in event and event["process"] == name]

    class Fate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print("epoch", epoch, flush=True)
            if attempt == "0" and epoch == 1:
                os.kill(pids("worker 1")[-1], signal.SIGKILL)
                while len(pids("worker 1")) == 1:
                    time.sleep(0.05)
        def on_epoch_begin(self, epoch, logs=None):
            if attempt == "0" and epoch == 4:
                os.kill(pids("ps 0")[-1], signal.SIGKILL)

    rng = np.random.default_rng(0)
    x = rng.normal(size=({STEPS * 32}, 8)).astype("float32")
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    history = model.fit(x, x.sum(1, keepdims=True), batch_size=32, epochs={EPOCHS}, verbose=0,
                        callbacks=[Fate(), keras.callbacks.BackupAndRestore(run_dir / "backup")])
    result = [int(model.optimizer.iterations), history.history["loss"][-1], history.epoch]
    (run_dir / "result.json").write_text(json.dumps(result))
"""


@pytest.mark.tensorflow
def test_training_survives_a_worker_and_a_server(tmp_path: Path) -> None:
    words = ("--ps", "1", "-np", "2", "--max-restarts", "2", "--log-dir", "logs", write_script(tmp_path, TRAIN))
    with job(*words, cwd=tmp_path, CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3") as running:
        ended = running.end(DEADLINE_S)
        assert running.left() == []
    assert ended.code == 0, f"{ended.stdout}\n{ended.stderr}"
    logs = tmp_path / "logs"
    steps, loss, epochs = json.loads((logs / "result.json").read_text())
    assert (steps, epochs) == (EPOCHS * STEPS, [4]) and loss < 0.05
    assert (logs / "chief.0" / "stdout").read_text().split() == "epoch 0 epoch 1 epoch 2 epoch 3".split()
    assert (logs / "attempt.1" / "chief.0" / "stdout").read_text() == "epoch 4\n"
    assert "tfdistkit: worker 1 was killed by SIGKILL" in ended.stderr
    assert "the first failure was\nps 0 was killed by SIGKILL" in ended.stderr
    changes = [event["event"] for event in read_events(logs) if "restart" in event["event"]]
    assert changes == ["worker_restarted", "job_restarting"]
