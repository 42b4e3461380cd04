"""Jobs that hang are explained and stopped; jobs that are slow are left alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from job_process import job, run_job, wait_until, write_script

from tfdistkit.report.events import read_events
from tfdistkit.report.hangs.layout import read_notes

WITH_TENSORFLOW = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}

TRAINING = """
import sys, time
import keras, numpy as np, tensorflow as tf
import tfdistkit

with tfdistkit.strategy("multiworker").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")


class Hang(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if sys.argv[1] == "callback" and epoch == 1 and tfdistkit.rank() == 1:
            time.sleep(1000)


def rows():
    for number in range(64):
        if sys.argv[1] == "data" and number == 40:
            time.sleep(1000)
        yield np.ones(4), np.ones(1)


spec = (tf.TensorSpec((4,)), tf.TensorSpec((1,)))
data = tf.data.Dataset.from_generator(rows, output_signature=spec).batch(8)
model.fit(data, epochs=3, verbose=0, callbacks=[Hang()])
"""

# Without TensorFlow: what a rank notes while it trains.
NOTES = """
import os, sys, time
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import Phase
rank, attempt = int(os.environ["TFDISTKIT_RANK"]), int(os.environ["TFDISTKIT_ATTEMPT"])
step = notes.noting_steps(lambda function: function(), 1)
notes.own.enter(Phase.SETUP)
step(lambda: None)
"""


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_a_callback_that_sleeps_on_one_rank(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINING)
    words = ("-np", "2", "--log-dir", "logs", "--hang-timeout", "8", script, "callback")
    ended = run_job(*words, cwd=tmp_path, **WITH_TENSORFLOW)
    assert ended.code == 1
    report = ended.stderr.partition("tfdistkit: the job hung, and was stopped after ")[2].splitlines()
    assert report[0].endswith("no rank made progress for 8 s."), ended.stderr
    assert report[1] == "rank 1 is in script.py:14 on_epoch_end: callbacks after training step 16 (epoch 2)"
    assert report[2].startswith("rank 0 waits in the collective `") and "script.py:" in report[2]
    assert report[3:5] == ["So rank 0 waits for rank 1.", "Stopped because of it: ranks 0, 1."]
    assert "time.sleep" not in report[1] and "on_epoch_end" in (tmp_path / "logs/rank.1/stacks").read_text()
    event = next(one for one in read_events(tmp_path / "logs") if one["event"] == "hang")
    assert event["places"] == report[1:4]
    noted = read_notes(tmp_path / "logs/rank.1")
    assert noted is not None
    assert event["time"] - time.time() + time.monotonic() < noted.since + 8 + 5


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_data_that_stand_still(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINING)
    ended = run_job("-np", "2", "--hang-timeout", "8", script, "data", cwd=tmp_path, **WITH_TENSORFLOW)
    assert ended.code == 1
    assert "ranks 0, 1 wait for data from script.py:20 rows in script.py:26 <module>: training step" in ended.stderr


def test_slow_jobs_are_left_alone(tmp_path: Path) -> None:
    """Rank 0 waits while rank 1 computes, writes a file, starts a program that computes, and takes slow steps."""
    script = write_script(
        tmp_path,
        NOTES
        + """
import subprocess
def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: pass
def write(seconds):
    end = time.monotonic() + seconds
    with open("file", "wb") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(bytes(1 << 20))
            time.sleep(0.2)
if rank == 1:
    step(lambda: compute(6))
    step(lambda: write(6))
    busy = "import time; end = time.monotonic() + 6\\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", busy])
    for _ in range(3):
        step(lambda: time.sleep(1.5))
    open("done", "w").close()
else:
    while not os.path.exists("done"):
        time.sleep(1)
""",
    )
    ended = run_job("-np", "2", "--hang-timeout", "4", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr


def test_a_hang_is_answered_by_a_restart(tmp_path: Path) -> None:
    hangs = "if attempt == 0 and rank == 1:\n    time.sleep(1000)\nelse:\n    step(lambda: time.sleep(1))"
    script = write_script(tmp_path, NOTES + hangs)
    ended = run_job("-np", "2", "--max-restarts", "1", "--hang-timeout", "2", script, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "attempt 0 hung after" in ended.stderr and "the job hung after" in ended.stderr
    assert "rank 1 is in script.py:" in ended.stderr and "as attempt 1 (restart 1 of 1)" in ended.stderr


def test_a_suspended_rank_is_named(tmp_path: Path) -> None:
    script = write_script(tmp_path, NOTES + "open(f'begun.{rank}', 'w').close()\ntime.sleep(1000)")
    with job("-np", "2", "--log-dir", "logs", "--hang-timeout", "3", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "begun.0", tmp_path / "begun.1")
        pids = [event["pid"] for event in read_events(tmp_path / "logs") if event["event"] == "worker_started"]
        os.kill(pids[1], signal.SIGSTOP)
        ended = running.end()
        assert running.left() == []
    where = "in script.py:10 <module>: between steps, after training step 1 (epoch 1) (stack read by py-spy)"
    assert f"rank 1 is suspended (SIGSTOP) {where}" in ended.stderr


WAITED = """
import types
module = sys.modules["tensorflow.python.framework.errors_impl"] = types.ModuleType("errors_impl")
exec("class OpError(Exception): pass", {"__name__": "tensorflow.python.framework.errors_impl"}, vars(module))
if rank == 1:
    open("begun", "w").close()
    time.sleep(1000)
while not os.path.exists("begun"):
    time.sleep(0.1)
time.sleep(0.5)
raise module.OpError("Collective has timed out")
"""


def test_a_timeout_of_a_collective_tells_where_the_peers_are(tmp_path: Path) -> None:
    script = write_script(tmp_path, NOTES + WAITED)
    ended = run_job("-np", "2", script, cwd=tmp_path)
    reported = ended.stderr.partition("the first failure was\n")[2]
    assert reported.startswith("rank 0 raised OpError"), ended.stderr
    assert "Meanwhile rank 1 is in script.py:" in reported


def test_without_a_timeout_a_job_waits(tmp_path: Path) -> None:
    script = write_script(tmp_path, NOTES + "open(f'begun.{rank}', 'w').close()\ntime.sleep(1000)")
    with job("-np", "2", "--hang-timeout", "0", script, cwd=tmp_path) as running:
        running.wait_for_files(tmp_path / "begun.0", tmp_path / "begun.1")
        with pytest.raises(AssertionError):
            wait_until(lambda: running.process.poll() is not None, "the end", 5.0)


def test_a_negative_timeout_is_refused(tmp_path: Path) -> None:
    ended = run_job("-np", "2", "--hang-timeout", "-1", write_script(tmp_path, ""), cwd=tmp_path)
    assert ended.code == 2 and "`hang_timeout` must be a positive number of seconds" in ended.stderr


def test_the_slowest_rank_is_named(tmp_path: Path) -> None:
    """Rank 1 takes its time between steps, and rank 0 waits for it in each."""
    script = write_script(
        tmp_path,
        NOTES
        + """
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
for number in range(45):
    if rank == 1:
        time.sleep(0.4)
        open(f"step.{number}", "w").close()
    step(lambda: wait_for(f"step.{number}"))
""",
    )
    ended = run_job("-np", "2", "--log-dir", "logs", script, cwd=tmp_path)
    assert ended.code == 0 and "tfdistkit: rank 1 was the slowest: the others waited for it in " in ended.stderr
    event = next(one for one in read_events(tmp_path / "logs") if one["event"] == "straggler")
    assert event["process"] == "rank 1" and event["share"] > 0.5 and list(event["phases"])[0] == "callbacks"
