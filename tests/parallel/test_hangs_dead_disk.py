"""A dead NFS server: the launcher says which file, and which line of the script, and ends although a rank does not.

This kernel has no NFS: a file system in user space that never answers stands for it (see `dead_disk`).
"""

from __future__ import annotations

import contextlib
import re
import time
from functools import partial
from pathlib import Path

import pytest
from dead_disk import NAMES, dead_disk, why_no_fuse
from job_process import Ended, job, wait_until, write_script
from test_run_hangs import NOTES, WITH_TENSORFLOW

from tfdistkit.cli.run import options
from tfdistkit.launcher.local.silent_folders import silent_folder
from tfdistkit.report.events import read_events
from tfdistkit.report.hangs.layout import read_notes

pytestmark = pytest.mark.skipif(bool(why_no_fuse()), reason=f"A dead disk is not tested: {why_no_fuse()}")

READ_AND_SAVE = """
def load():
    with open(sys.argv[1] + "/train.csv") as file:
        file.read()
def save():
    with notes.noting(Phase.SAVE), open(sys.argv[1] + "/model.keras", "wb") as file:
        file.write(bytes(100_000))
if rank == 0:
    step(load)
else:
    save()
"""

TRAIN = """
import os, sys
import keras, numpy as np, tensorflow as tf
import tfdistkit

with tfdistkit.strategy("multiworker").scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if os.environ["TFDISTKIT_ATTEMPT"] == "0":
    lines = tf.data.TextLineDataset(sys.argv[1] + "/train.csv")
    data = lines.map(lambda line: (tf.ones(4), tf.ones(1))).batch(8)
    model.fit(data, verbose=0)
data = tf.data.Dataset.from_tensor_slices((np.ones((64, 4)), np.ones((64, 1)))).batch(8)
save = tfdistkit.callbacks.ChiefCheckpoint(sys.argv[1] + "/model.keras")
model.fit(data, epochs=2, verbose=0, callbacks=[save])
"""


def run(folder: Path, script: str, *words: str, **variables: str) -> Ended:
    """Runs a job of two ranks whose data is on a dead disk, to the end of its launcher."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(dead_disk(folder / "disk"))
        words = ("-np", "2", "--log-dir", "logs", *words, script, str(disk))
        with job(*words, cwd=folder, **variables) as running:
            try:
                ended = running.end(120)
            finally:
                stack.close()  # Only then do the ranks end.
            deadline = time.monotonic() + 30
            while running.left():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            return ended


def test_the_file_is_named_and_the_launcher_ends(tmp_path: Path) -> None:
    ended = run(tmp_path, write_script(tmp_path, NOTES + READ_AND_SAVE), "--hang-timeout", "3")
    assert ended.code == 1
    report = ended.stderr.partition("tfdistkit: the job hung, and was stopped after ")[2].splitlines()
    reading, saving = (f", blocked in the kernel {verb} {tmp_path}/disk/" for verb in ("reading", "writing"))
    step, save = "training step 2 (epoch 1)", "saving a checkpoint or backup after training step 1 (epoch 1)"
    assert report[1:4] == [
        f"rank 0 waits for data in script.py:12 load: {step}{reading}train.csv (stack read by py-spy)",
        f"rank 1 is in script.py:15 save: {save}{saving}model.keras (stack read by py-spy)",
        "Stopped because of it: ranks 0, 1.",
    ]
    assert re.search(r"tfdistkit: ranks 0, 1 did not end after SIGKILL \(pid \d+, \d+\)", ended.stderr)
    hang = next(one for one in read_events(tmp_path / "logs") if one["event"] == "hang")
    noted = read_notes(tmp_path / "logs/rank.0")
    assert noted is not None and hang["time"] - time.time() + time.monotonic() < noted.since + 3 + 5
    assert ended.seconds < 3 + 5 + 15


@pytest.mark.thorough
@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_training_and_checkpoints(tmp_path: Path) -> None:
    words = ("--hang-timeout", "6", "--max-restarts", "1")
    ended = run(tmp_path, write_script(tmp_path, TRAIN), *words, **WITH_TENSORFLOW)
    assert ended.code == 1
    first, _, second = ended.stderr.partition("tfdistkit: the job hung, and was stopped after ")
    disk = re.escape(str(tmp_path / "disk"))
    blocked = rf"blocked in the kernel (reading|opening) {disk}/train.csv"
    reading = rf"ranks? (0, )?1 .* in script.py:12 <module>: .*, {blocked}"
    assert re.search(reading, first), ended.stderr
    saving = rf"rank 0 is in script.py:15 <module>: saving a checkpoint .*, blocked in the kernel writing {disk}/"
    assert re.search(saving, second), ended.stderr
    assert "So rank 1 waits for rank 0." in second


def test_a_run_folder_whose_disk_dies(tmp_path: Path) -> None:
    """The launcher cannot go on, but says why, and how to end the job."""
    script = write_script(tmp_path, "")
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(dead_disk(tmp_path / "disk"))
        with job("-np", "2", "--log-dir", str(disk / "logs"), script, cwd=tmp_path) as running:
            said = f"blocked in the kernel for 10 s, writing {disk}/logs/events.jsonl: the disk does not answer."
            try:
                wait_until(lambda: said in running.stderr_path.read_text(), "a report of the launcher", 30)
            finally:
                stack.close()
            running.end()
    assert f"kill -9 {running.process.pid} " in running.stderr_path.read_text()


def test_folders_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(options, "silent_folder", partial(silent_folder, timeout_s=1.0))
    script = write_script(tmp_path, "")
    with dead_disk(tmp_path / "disk", NAMES) as disk:
        for words, what in (
            (["--log-dir", str(disk / "logs"), script], "`--log-dir`"),
            ([str(disk / "train.py")], "The script"),
        ):
            with pytest.raises(SystemExit):
                options.parse(["-np", "2", *words])
            said = capsys.readouterr().err
            assert f"{what} must be on a disk that answers. Received: {disk}/" in said
            assert f"on the fuse at {disk}: no answer within 1 s." in said
        assert options.parse(["-np", "2", "--log-dir", str(tmp_path / "logs"), script]).np == 2
