"""The examples as a user starts them: under `python`, and with two workers, with equal results."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
PLAIN = [sys.executable]
TWO_WORKERS = [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--timeout", "150"]


def start(*command: object, timeout_s: float = 180) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    run = subprocess.run(
        [str(word) for word in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def train(how: list[str], example: str, folder: pathlib.Path, *flags: str) -> dict[str, Any]:
    folder.mkdir()
    files = [f"--history_file={folder / 'history.json'}", f"--checkpoint={folder / 'model.keras'}"]
    start(*how, EXAMPLES / example, *files, *flags)
    assert sorted(path.name for path in folder.iterdir()) == ["history.json", "model.keras"]
    history: dict[str, Any] = json.loads((folder / "history.json").read_text())
    return history


@pytest.mark.parametrize(
    ("example", "flags"),
    [("digits.py", ["--epochs=3", "--seed=1"]), ("char_lm.py", ["--epochs=2", "--sequences=600", "--batch_size=50"])],
)
def test_two_workers_train_as_one_process(tmp_path: pathlib.Path, example: str, flags: list[str]) -> None:
    one = train(PLAIN, example, tmp_path / "one", *flags)
    two = train(TWO_WORKERS, example, tmp_path / "two", *flags)
    np.testing.assert_allclose(two["loss"], one["loss"], rtol=1e-5)
    assert one["loss"][-1] < one["loss"][0]


def test_demo_trains_and_compares() -> None:
    output = start(*PLAIN, EXAMPLES / "demo.py")
    accuracy = re.search(r"test accuracy +(0\.\d+) \(one worker: (0\.\d+)\)", output)
    assert accuracy and accuracy[1] == accuracy[2] and float(accuracy[1]) > 0.9, output
    assert re.search(r"examples per second +\d+ ", output) and "differs from one worker" in output
    assert output.count("Epoch 1/") == 1  # one progress bar for two workers, and none of the second run


def test_quickstart_does_what_it_says(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (EXAMPLES.parent / "docs" / "quickstart.md").read_text()
    before, after = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    losses = []
    for how, script in ((PLAIN, before), (PLAIN, after), (TWO_WORKERS, after)):
        (tmp_path / "train.py").write_text(script)
        losses += re.findall(r"loss of the last epoch: (.*)", start(*how, "train.py"))
        (tmp_path / "digits.keras").unlink()
    assert len(losses) == 2  # one line for each run of the second script: the chief's
    np.testing.assert_allclose(float(losses[1]), float(losses[0]), rtol=1e-5)


@pytest.mark.parametrize("example", ("digits.py", "char_lm.py"))
def test_examples_are_short(example: str) -> None:
    assert len((EXAMPLES / example).read_text().splitlines()) < 80
