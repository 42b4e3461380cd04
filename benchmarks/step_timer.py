"""Overhead of `StepTimer`: `fit` with and without it in one process, on two workers, on two workers and a server.

Goal: less than 1 % of a step. Run: python benchmarks/step_timer.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pairs

import tfdistkit


def trained(strategy: Any, steps: int, callbacks: list[Any]) -> Callable[[], float]:
    """Returns a call that trains for some steps and returns seconds per step."""
    import keras
    import numpy as np

    with strategy.scope():
        hidden = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((256,)), *hidden, keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x = np.random.default_rng(0).normal(size=(64 * steps, 256)).astype("float32")
    y = np.zeros(len(x), "int32")

    def run() -> float:
        start = time.perf_counter()
        model.fit(x, y, batch_size=64, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
        return (time.perf_counter() - start) / steps

    return run


def measure(rounds: int, steps: int) -> None:
    strategy = tfdistkit.strategy("auto")
    timer = tfdistkit.callbacks.StepTimer(verbose=0)
    variants = {"without": trained(strategy, steps, []), "with StepTimer": trained(strategy, steps, [timer])}
    found = pairs.in_turn(variants, rounds)
    if tfdistkit.is_chief():
        print(f"{type(strategy).__name__}, {tfdistkit.world_size()} worker(s)")
        pairs.show(found, "without", "s/step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.rounds, args.steps)
        return
    for cluster in (["-np", "1"], ["-np", "2"], ["-np", "2", "--ps", "1"]):
        words = [__file__, "--measure", "--rounds", str(args.rounds), "--steps", str(args.steps)]
        command = [sys.executable, "-m", "tfdistkit", "run", *cluster, *words]
        subprocess.run(command, check=True, timeout=1800)


if __name__ == "__main__":
    main()
