"""A training that resumes with other code than that of its backup says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tensorflow

TRAIN = """
import sys
import keras, numpy as np
import tfdistkit
from parts import losses

class Break(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and sys.argv[1] == "breaks":
            raise SystemExit("broken")

backup = tfdistkit.callbacks.BackupAndResume("backup", save_freq=1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", losses.mine)
model.fit(np.ones((64, 4)), np.ones((64, 1)), batch_size=8, verbose=0, callbacks=[backup, Break()])
"""
LOSS = "def mine(y_true, y_pred):\n    return (y_pred - y_true) ** 2\n"


def run(folder: Path, how: str) -> str:
    command = [sys.executable, "train.py", how]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0) == (how != "breaks"), done.stderr
    return done.stderr


def test_changed_code_is_named(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "parts/losses.py").write_text(LOSS)
    run(tmp_path, "breaks")
    assert "the code has changed" not in run(tmp_path, "breaks")
    (tmp_path / "parts/losses.py").write_text(LOSS.replace("** 2", "** 4"))
    (tmp_path / "train.py").write_text(TRAIN + "print('done')\n")
    assert "the code has changed since the backup: parts/losses.py, train.py. Training resumes with" in run(
        tmp_path, ""
    )
