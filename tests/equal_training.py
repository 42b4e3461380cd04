"""A small training of two workers, on hosts or nodes of a cluster, and of one process: the same losses and weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

# Trains under the strategy named on the command line, and prints what came out; one write for a line.
TRAIN = """
    import json, os, sys
    import numpy as np
    import keras, tfdistkit
    strategy = tfdistkit.strategy(sys.argv[1])
    keras.utils.set_random_seed(7)
    numbers = np.random.default_rng(1)
    x, y = (numbers.normal(size=(20, width)).astype("float32") for width in (5, 1))
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
    told = {
        "host": os.uname().nodename,
        "strategy": type(strategy).__name__,
        "rank": tfdistkit.rank(),
        "replicas": strategy.num_replicas_in_sync,
        "losses": losses,
        "weights": [float(number) for weights in model.get_weights() for number in weights.flatten()],
    }
    if told["strategy"] == "HorovodStrategy":
        import horovod.tensorflow as hvd
        told["horovod_over"] = "mpi" if hvd.mpi_enabled() else "gloo"
    os.write(1, ("RESULT " + json.dumps(told) + chr(10)).encode())
"""

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
}


def write_training(folder: Path) -> str:
    """Writes the script and returns its path."""
    path = folder / "equal_training_script.py"
    path.write_text(textwrap.dedent(TRAIN), encoding="utf-8")
    return str(path)


def train_alone(folder: Path) -> dict[str, Any]:
    """Returns what the training comes to in a single process."""
    command = [sys.executable, write_training(folder), "one_device"]
    variables = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    (result,) = read_results(ended.stdout)
    assert result["replicas"] == 1
    return result


def read_results(printed: str) -> list[dict[str, Any]]:
    """Returns what each rank printed, in rank order, whatever stands before it on a line."""
    found = [json.loads(line.partition("RESULT ")[2]) for line in printed.splitlines() if "RESULT " in line]
    return sorted(found, key=lambda one: int(one["rank"]))


def check_equal(results: list[dict[str, Any]], alone: dict[str, Any], hosts: list[str], strategy: str) -> None:
    """Two ranks on these hosts have trained together, and come to the same as one process."""
    assert [(one["rank"], one["replicas"], one["host"]) for one in results] == [(0, 2, hosts[0]), (1, 2, hosts[1])]
    assert {one["strategy"] for one in results} == {strategy}
    assert results[0]["losses"] == results[1]["losses"] and results[0]["weights"] == results[1]["weights"]
    for name in ("losses", "weights"):
        for here, there in zip(results[0][name], alone[name], strict=True):
            assert math.isclose(here, there, rel_tol=1e-4, abs_tol=1e-6), (name, here, there)
