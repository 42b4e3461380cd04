"""What a strategy costs where there is nothing to distribute: `fit` plain, under `one_device`, under `multiworker`.

Goal: at most 1.05 times plain Keras. Run: python benchmarks/overhead.py
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    # multiworker comes first: it configures collectives, which has to happen before the first operation.
    multiworker = tfdistkit.strategy("multiworker")
    one_device = tfdistkit.strategy("one_device")
    variants = {
        "plain Keras": fit_under(None, args.steps),
        "one_device": fit_under(one_device, args.steps),
        "multiworker, one worker": fit_under(multiworker, args.steps),
    }
    pairs.show(pairs.in_turn(variants, args.rounds), "plain Keras", "s/step")


if __name__ == "__main__":
    main()
