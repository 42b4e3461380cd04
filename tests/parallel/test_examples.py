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
from rank_jobs import OVER_ONE, engine_options

pytestmark = pytest.mark.tensorflow

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
STARTUP = pathlib.Path(__file__).parents[1] / "startup"
PLAIN = [sys.executable]
TWO_WORKERS = [sys.executable, "-m", "tfdistkit", "run", "-np", "2", "--timeout", "150"]
FLAGS = {"digits.py": ["--epochs=3", "--seed=1"], "char_lm.py": ["--epochs=2", "--sequences=600", "--batch_size=50"]}


def start(*command: object, timeout_s: float = 180, **variables: str) -> str:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **variables}
    # The examples need scikit-learn.
    path = [entry for entry in environment["PYTHONPATH"].split(os.pathsep) if entry != str(STARTUP)]
    run = subprocess.run(
        [str(word) for word in command],
        env={**environment, "PYTHONPATH": os.pathsep.join(path)},
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


@pytest.mark.parametrize("engine", OVER_ONE)
def test_two_workers_train_as_one_process(
    tmp_path: pathlib.Path, of_one_process: dict[str, Any], engine: str, request: pytest.FixtureRequest
) -> None:
    options, variables = engine_options(request.getfixturevalue, engine)
    two = train([*TWO_WORKERS, *options], of_one_process["example"], tmp_path / "two", **variables)
    np.testing.assert_allclose(two["loss"], of_one_process["loss"], rtol=1e-5)


def test_demo_trains_and_compares() -> None:
    output = start(*PLAIN, EXAMPLES / "demo.py", "--simulations=1024", "--epochs=2", timeout_s=280)
    accuracy = re.search(r"test accuracy +(0\.\d+) \(one worker: (0\.\d+)\)", output)
    assert accuracy and accuracy[1] == accuracy[2] and float(accuracy[1]) > 0.9, output
    assert output.count("loss curve      differs from one worker by at most ") == 2, output
    assert output.count("Epoch 1/") == 1  # one progress bar for two workers, and none of the second run
    assert not re.search(r"^(\[\d\] )?[IWEF]\d{4} ", output, re.MULTILINE), output  # no lines of loggers
    *_, last = output.splitlines()
    # How much is gained is up to the machine, and to who else uses it now.
    seconds = r"1 worker: \d+\.\d s per epoch, 2 workers: \d+\.\d s"
    assert re.fullmatch(rf"speed +{seconds}: (\d+\.\d times as fast|no gain \(.*\))", last), output


def test_demo_says_what_was_measured_if_nothing_is_gained() -> None:
    code = "import demo; print(demo.gain(3.0, 1.5)); print(demo.gain(3.0, 2.9)); print(demo.gain(3.0, 6.0))"
    gained, *none = start(*PLAIN, "-c", code, PYTHONPATH=str(EXAMPLES)).splitlines()
    assert gained == "2.0 times as fast"
    assert len(none) == 2 and all(line.startswith("no gain (cores that this process may use: ") for line in none)


def test_readme_script_trains_on_two_workers(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    output = start(*TWO_WORKERS, "train.py")
    assert "starting 2 workers on this machine: train.py" in output and "Epoch 2/2" in output
    assert (tmp_path / "model.keras").exists()


def test_make_demo_shows_nothing_but_the_demo(tmp_path: pathlib.Path) -> None:
    # Stands in for a Python whose pip has something to warn of on this machine.
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        """#!/bin/sh
case "$*" in
*"pip install"*"--quiet --quiet"*) ;;
*"pip install"*) echo "WARNING: Location 'file:///pypi/' is ignored: it is neither a file nor a directory." ;;
*demo.py) echo "the demo" ;;
esac
"""
    )
    python.chmod(0o755)
    folder = tmp_path / "venv"
    output = start("make", "--no-print-directory", "-C", EXAMPLES.parent, "demo", f"VENV={folder}", MAKEFLAGS="")
    told, *rest = output.splitlines()
    assert told.startswith(f"Installing tfdistkit and TensorFlow into {folder}") and rest == ["the demo"], output


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


def test_slow_link_tells_bytes_time_and_loss() -> None:
    output = start(*TWO_WORKERS, EXAMPLES / "slow_link.py", "--send=local_sgd", "--epochs=3")
    line = r"^\[0\] local_sgd +([\d.]+) MB +[\d.]+ ms   loss ([\d.]+)   accuracy ([\d.]+)$"
    found = re.search(line, output, re.MULTILINE)
    # Weights and momentum of 1.076 million numbers, after 20 steps and at the end of an epoch of 23.
    assert found is not None and float(found[1]) == pytest.approx(2 * 2 * 4.304 / 23, rel=0.01), output
    assert float(found[3]) > 0.8, output


@pytest.mark.thorough
def test_slow_link_compares_the_ways_to_send() -> None:
    lines = start(*PLAIN, EXAMPLES / "slow_link.py", "--epochs=2").splitlines()[-5:]
    sent = {line.split()[0]: float(line.split()[1]) for line in lines[1:]}
    assert list(sent) == ["none", "fp16", "power_sgd", "local_sgd"], lines
    assert sent["fp16"] == pytest.approx(sent["none"] / 2, rel=0.01) and sent["power_sgd"] < 0.1 * sent["none"], lines


def test_elastic_ends_like_an_undisturbed_run(tmp_path: pathlib.Path) -> None:
    words = (EXAMPLES / "elastic.py", "--epochs=3", f"--backup={tmp_path / 'backup'}")
    elastic = [sys.executable, "-m", "tfdistkit", "run", "-np", "2:3", "--timeout", "270"]
    outputs = [start(*PLAIN, *words), start(*elastic, *words, "--lose_at=40", timeout_s=300)]
    assert "the job continues with 2 workers instead of 3" in outputs[1]
    found = re.findall(r"epoch (\d): loss [\d.]+ with (\d) workers", outputs[1])
    assert found == [("1", "3"), ("2", "2"), ("3", "2")], outputs[1]
    losses = [[float(x) for x in re.findall(r"losses: (.*)", output)[-1].split()] for output in outputs]
    np.testing.assert_allclose(losses[1], losses[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("example", ("digits.py", "char_lm.py", "slow_link.py", "elastic.py"))
def test_examples_are_short(example: str) -> None:
    assert len((EXAMPLES / example).read_text().splitlines()) < 80
