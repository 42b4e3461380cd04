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
from rank_jobs import ENGINES, engine_options

pytestmark = pytest.mark.tensorflow

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
PLAIN = [sys.executable]
TWO_WORKERS = [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--timeout", "150"]
FLAGS = {"digits.py": ["--epochs=3", "--seed=1"], "char_lm.py": ["--epochs=2", "--sequences=600", "--batch_size=50"]}


def start(*command: object, timeout_s: float = 180, **variables: str) -> str:
    run = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


def train(how: list[str], example: str, folder: pathlib.Path, **variables: str) -> dict[str, Any]:
    folder.mkdir()
    files = [f"--history_file={folder / 'history.json'}", f"--checkpoint={folder / 'model.keras'}"]
    start(*how, EXAMPLES / example, *files, *FLAGS[example], **variables)
    assert sorted(path.name for path in folder.iterdir()) == ["history.json", "model.keras"]
    history: dict[str, Any] = json.loads((folder / "history.json").read_text())
    return history


@pytest.fixture(scope="module", params=FLAGS)
def of_one_process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an example says under `python`."""
    history = train(PLAIN, request.param, tmp_path_factory.mktemp("one") / "files")
    assert history["loss"][-1] < history["loss"][0]
    return {"example": request.param, **history}


@pytest.mark.parametrize("engine", ENGINES)
def test_two_workers_train_as_one_process(
    tmp_path: pathlib.Path, of_one_process: dict[str, Any], engine: str, request: pytest.FixtureRequest
) -> None:
    options, variables = engine_options(request.getfixturevalue, engine)
    two = train([*TWO_WORKERS, *options], of_one_process["example"], tmp_path / "two", **variables)
    np.testing.assert_allclose(two["loss"], of_one_process["loss"], rtol=1e-5)


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
