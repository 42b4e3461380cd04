"""Training on hosts that may be lost: the folder of its backups, and workers that live on where they are cut off."""

from __future__ import annotations

from pathlib import Path

import pytest
from counted_rows import SETUP
from net_hosts import LOGIN, NetHosts
from random_faults import DEADLINE_S, in_folder
from ssh_jobs import PATHS, ssh_job

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(900)]

OPTIONS = ("-x", f"PYTHONPATH={PATHS}", "-x", "CUDA_VISIBLE_DEVICES=-1", "-x", "TF_CPP_MIN_LOG_LEVEL=3")

CUT_OFF = f"""
{SETUP}
backup = BackupAndResume("backup", save_freq=1000 if attempt == 0 else 1)


class Watch(keras.callbacks.Callback):
    "The first attempt makes its only backup, when it is asked to end, after the second one has looked for one."
    def on_train_batch_end(self, batch, logs=None):
        print("attempt", attempt, "step", batch, flush=True)
        (here / f"begun.{{attempt}}").touch()
        deadline = time.monotonic() + 60
        while attempt == 0 and batch == 2 and not (here / "begun.1").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        if attempt == 0:
            time.sleep(1)  # until it is asked to end
        while attempt == 1 and not (here / "backup/training.backup").exists():
            time.sleep(0.1)
            assert time.monotonic() < deadline, "the first attempt has made no backup"


history = model.fit(data, epochs=2, verbose=0, callbacks=[Watch(), backup])
print("done in attempt", attempt, flush=True)
"""


def test_a_worker_that_is_cut_off_and_saves_later_does_not_disturb_its_successor(
    whole: NetHosts, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(in_folder(tmp_path, CUT_OFF))
    options = (*OPTIONS, "-H", "h1:1,h2:1", "-np", "1:1")
    with ssh_job(whole, *options, str(script), "multiworker") as running:
        running.wait_for("attempt 0 step 2", deadline_s=DEADLINE_S)
        whole.pull_cable(1)
        ended = running.end(DEADLINE_S)
    assert ended.code == 0, ended.stderr
    assert "attempt 1 step 0" in ended.stdout and "done" in ended.stdout
    assert not (tmp_path / "backup").exists()


def test_a_folder_of_backups_that_another_host_does_not_see_is_refused(whole: NetHosts) -> None:
    script = f"""
{SETUP}
model.fit(data, epochs=1, verbose=0, callbacks=[BackupAndResume("backup", save_freq=5)])
"""
    for number in (LOGIN, *whole.numbers):
        (whole.disk(number) / "train.py").write_text(script)
    # The working directory is a disk of each host.
    with ssh_job(whole, *OPTIONS, "-H", "h1:1,h2:1", "-np", "1:2", "train.py", "multiworker") as running:
        ended = running.end(DEADLINE_S)
    assert ended.code == 1
    assert "All ranks must see the folder of the backups in a job whose number of workers may change" in ended.stderr
    assert f"Received: '{whole.work}/backup', which rank 0 has, but not rank 1." in ended.stderr
    assert not (whole.disk(1) / "backup").exists()
