"""Overhead of a strategy with nothing to distribute: `fit` plain, under `one_device`, under `multiworker`.

Goal: at most 1.05 times plain Keras. Also the overhead of comparing the data of two workers (`check_data`; goal: at
most 1.01 times `fit` without), and of the progress notes of a step (goal: at most 0.5 % of 5 ms).
Run: python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pairs

import tfdistkit


def fit_under(strategy: object, steps: int) -> Callable[[], float]:
    """Returns a call that trains for some steps and returns seconds per step."""
    import keras
    import tensorflow as tf

    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(64, 3, activation="relu"),
                keras.layers.GlobalAveragePooling2D(),
                keras.layers.Dense(10),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x = tf.random.stateless_normal((64, 28, 28, 1), (1, 2))
    y = tf.zeros((64,), tf.int32)
    data = tf.data.Dataset.from_tensors((x, y)).repeat(steps)

    def run() -> float:
        start = time.perf_counter()
        model.fit(data, epochs=1, verbose=0)
        return (time.perf_counter() - start) / steps

    return run


def compare_data(rounds: int, steps: int) -> None:
    """Runs in each of two workers: times `fit` with and without the comparison of data, and the comparison alone."""
    from tfdistkit.strategies.consistency import row_exchange

    strategy = tfdistkit.strategy("multiworker")
    fit = fit_under(strategy, steps)

    def with_option(check_data: bool) -> float:
        strategy.check_data = check_data
        return fit()

    variants = {"check_data=False": lambda: with_option(False), "check_data=True": lambda: with_option(True)}
    results = pairs.in_turn(variants, rounds)

    def exchange(by: Callable[[Any, np.ndarray], np.ndarray]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            for number in range(100):
                by(strategy, np.arange(8) + number)
            return (time.perf_counter() - start) * 10  # milliseconds for each

        return run

    exchanges = {"a collective": exchange(row_exchange.by_collective), "a comparison": exchange(row_exchange.table)}
    results_of_exchanges = pairs.in_turn(exchanges, rounds)
    if tfdistkit.is_chief():
        pairs.show(results, "check_data=False", "s/step")
        pairs.show(results_of_exchanges, "a collective", "ms")


def cost_of_notes(rounds: int) -> None:
    """Times the progress notes of a step, as `tfdistkit run` has them, with 10 collectives and without."""
    from tfdistkit import env
    from tfdistkit.report.hangs import notes

    with tempfile.TemporaryDirectory() as folder:
        os.environ[env.TASK_DIR] = folder
        notes.begin()
        del os.environ[env.TASK_DIR]

    def collectives(_: Any) -> None:
        for _ in range(10):
            notes.own.begin_operation(b"sum of float32 [1000, 1000]")
            notes.own.end_operation()

    def timed(step: Callable[[Any], Any]) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            for _ in range(20_000):
                step(None)
            return (time.perf_counter() - start) / 20_000 * 1e6

        return run

    variants = {
        "no notes": timed(lambda _: None),
        "of a step": timed(notes.noting_steps(lambda _: None, 1)),
        "of a step, 10 collectives": timed(notes.noting_steps(collectives, 1)),
    }
    for name, values in pairs.in_turn(variants, rounds).items():
        median = statistics.median(values)
        print(f"progress notes, {name:<28} {median:>6.2f} us, {median / 5000:.3%} of a step of 5 ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--compare-data", action="store_true", help="run as one of the two workers that compare their data"
    )
    args = parser.parse_args()
    if args.compare_data:
        return compare_data(args.rounds, args.steps)
    # multiworker comes first: it must configure collectives before the first operation.
    multiworker = tfdistkit.strategy("multiworker")
    one_device = tfdistkit.strategy("one_device")
    variants = {
        "plain Keras": fit_under(None, args.steps),
        "one_device": fit_under(one_device, args.steps),
        "multiworker, one worker": fit_under(multiworker, args.steps),
    }
    pairs.show(pairs.in_turn(variants, args.rounds), "plain Keras", "s/step")
    words = [__file__, "--compare-data", "--rounds", str(args.rounds), "--steps", str(args.steps)]
    subprocess.run([sys.executable, "-m", "tfdistkit", "run", "-np", "2", *words], check=True)
    return cost_of_notes(args.rounds)


if __name__ == "__main__":
    main()
