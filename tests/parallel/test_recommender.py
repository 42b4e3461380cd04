"""The recommender reaches, with a server and two workers, the quality of one process, which is the best possible."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.tensorflow

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "recommender.py"
HOW = {
    "one process": [sys.executable],
    "a server and two workers": [sys.executable, "-m", "tfdistkit", "run", "--ps", "1", "-np", "2", "--timeout", "200"],
}
# One rating in ten is noise, so no model can do better than 0.9 but for the luck of 15,000 draws, whose standard
# deviation is sqrt(0.9 * 0.1 / 15,000) = 0.0024. Runs with other seeds and other orders stay within 0.001.
BEST, LUCK, NOISE = 0.9, 0.0075, 0.003


@pytest.mark.timeout(400)
def test_quality_does_not_depend_on_how_it_is_trained(tmp_path: pathlib.Path) -> None:
    accuracy = {}
    for name, how in HOW.items():
        file = tmp_path / f"{name}.json"
        command = [*how, str(EXAMPLE), f"--history_file={file}", "--epochs=5"]
        run = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}, capture_output=True, text=True,
                             timeout=220)  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        accuracy[name] = json.loads(file.read_text())["test_accuracy"]
        assert abs(accuracy[name] - BEST) < LUCK, accuracy
    assert abs(accuracy["one process"] - accuracy["a server and two workers"]) < NOISE, accuracy
