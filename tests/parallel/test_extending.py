"""The examples of docs/extending.md, in a folder outside of the package: as written there, and registered so."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
DEADLINE_S = 200

TRAIN = """
    import keras, numpy as np, tfdistkit
    from my_callback import MeanOfRanks
    strategy = tfdistkit.strategy("reporting", timeout_s=60)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[MeanOfRanks(lambda: 1 + tfdistkit.rank())])
"""

REDUCE = """
    import keras, numpy as np, tensorflow as tf, tfdistkit
    from my_reducer import BF16WithFeedback
    strategy = tfdistkit.strategy("multiworker", reducer=BF16WithFeedback())
    with strategy.scope():
        start = keras.initializers.Constant(1.0)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=start)])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    # The gradients of the two ranks, 1.001 each time, which bfloat16 cuts to 1 until the rest has grown.
    x = np.ones((4, 1), "float32")
    for _ in range(8):
        kernel = float(model.trainable_weights[0].numpy()[0, 0])
        model.train_on_batch(x, np.full((4, 1), kernel - 1.001 / 2, "float32"))
    states = [v for v in model.optimizer.variables if "cut_off" in v.path]
    print("went", round(1.0 - float(model.trainable_weights[0].numpy()[0, 0]), 4), "states", len(states), flush=True)
"""


ALONE = """
    import keras, numpy as np, tfdistkit
    from my_algorithm import AverageEvery
    strategy = tfdistkit.strategy("multiworker", algorithm=AverageEvery(2))
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.5), "mse")  # One step goes to the target of a rank's own rows.
    x, y = np.ones((4, 1), "float32"), np.array([[1], [1], [3], [3]], "float32")
    kernel = lambda: round(float(model.trainable_weights[0].numpy()[0, 0]), 4)
    seen = []
    for _ in range(3):
        model.train_on_batch(x, y)
        seen.append(kernel())
    model.evaluate(x, y, verbose=0)
    print("kernel", seen, "then", kernel(), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, installed as a package is: a folder with its entry points beside them."""
    text = PAGE.read_text()
    folder = tmp_path_factory.mktemp("extensions")
    files = re.findall(r"```python\n# (my_\w+\.py)\n(.*?)```", text, re.DOTALL)
    names = [name for name, _ in files]
    assert names == [
        f"my_{what}.py" for what in ("strategy", "environment", "backend", "reducer", "algorithm", "callback")
    ]
    for name, code in files:
        (folder / name).write_text(code)
    config = configparser.ConfigParser()
    config.read_string(re.findall(r"```ini\n(.*?)```", text, re.DOTALL)[0])
    points = [f"[{group}]{names}" for group, names in config["options.entry_points"].items()]
    info = folder / "extensions-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extensions\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(points))
    return folder


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(PAGE.parents[1])])
    return subprocess.run(
        [sys.executable, "-m", "tfdistkit", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1", **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_a_scheduler(folder: Path) -> None:
    ended = run(folder, "env", COBALT_RANK="1", COBALT_NODES="node1:2222,node2:2222")
    assert ended.returncode == 0, ended.stderr
    assert "COBALT_RANK=1" in ended.stdout and re.search(r"rank +1", ended.stdout), ended.stdout


@pytest.mark.tensorflow
def test_a_backend_a_strategy_and_a_callback(folder: Path) -> None:
    (folder / "train.py").write_text(textwrap.dedent(TRAIN))
    ended = run(folder, "run", "--backend", "setsid", "-np", "2", "--log-dir", "logs", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "starting 2 workers by setsid on this machine: train.py" in ended.stderr
    for rank in (0, 1):
        assert ended.stdout.count(f"[{rank}] an epoch of 2 replicas has ended") == 2, ended.stdout
    assert "[0] epoch 1: mean 1.5" in ended.stdout and "[1] epoch" not in ended.stdout


@pytest.mark.tensorflow
def test_a_reducer(folder: Path) -> None:
    (folder / "reduce.py").write_text(textwrap.dedent(REDUCE))
    ended = run(folder, "run", "-np", "2", "reduce.py")
    assert ended.returncode == 0, ended.stderr
    for rank in (0, 1):
        found = re.search(rf"\[{rank}\] went ([\d.]+) states 1", ended.stdout)
        # Without feedback, 8 steps of bfloat16 would go 8.0.
        assert found and 8.0 < float(found[1]) < 8.02, ended.stdout


@pytest.mark.tensorflow
def test_an_algorithm(folder: Path) -> None:
    (folder / "alone.py").write_text(textwrap.dedent(ALONE))
    ended = run(folder, "run", "-np", "2", "alone.py")
    assert ended.returncode == 0, ended.stderr
    assert "[0] kernel [1.0, 2.0, 1.0] then 2.0" in ended.stdout, ended.stdout
    assert "[1] kernel [3.0, 2.0, 3.0] then 2.0" in ended.stdout, ended.stdout


def test_a_worker_of_the_backend_that_fails(folder: Path) -> None:
    (folder / "fails.py").write_text("import tfdistkit, time\nif tfdistkit.rank(): raise SystemExit(3)\ntime.sleep(60)")
    ended = run(folder, "run", "--backend", "setsid", "-np", "2", "fails.py")
    assert ended.returncode == 3 and "rank 1 ended with exit code 3" in ended.stderr, ended.stderr


def test_an_unknown_backend_names_those_that_there_are(folder: Path) -> None:
    (folder / "train.py").touch()
    ended = run(folder, "run", "--backend", "setsit", "-np", "2", "train.py")
    assert ended.returncode == 2 and "setsid" in ended.stderr, ended.stderr
