"""A table of a million rows in one process: steps per second and copies of the table in a step, stock and ours.

The steps: the model of the variants is the same, an Embedding of 1M x 16 and one Dense layer; batches of 256 x 8.
The copies (`--copies`): one process for each optimizer, with no free block of the table's size when the steps begin.
TensorFlow keeps memory that it has freed, so the growth of the process is the peak.
Run: python benchmarks/embedding.py [--copies]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pairs

import tfdistkit

_ROWS, _WIDTH, _BATCH, _IDS = 1_000_000, 16, 256, 8

# Name -> class, options.
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {}),
    "SGD, clipnorm": ("SGD", {"clipnorm": 1.0}),
    "SGD, clipvalue": ("SGD", {"clipvalue": 1.0}),
    "SGD, global_clipnorm": ("SGD", {"global_clipnorm": 1.0}),
    "SGD in LossScaleOptimizer": ("SGD", {}),
    "Adagrad": ("Adagrad", {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}),
    "SGD, weight_decay": ("SGD", {"weight_decay": 0.01}),
    "SGD, use_ema": ("SGD", {"use_ema": True}),
    "SGD, gradient_accumulation_steps": ("SGD", {"gradient_accumulation_steps": 2}),
    **{name: (name, {}) for name in ("Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "Nadam", "Ftrl", "Lion")},
    **{name: (name, {}) for name in ("Lamb", "Adafactor", "Muon")},
}


def trained(strategy: Any, optimizer: str, shards: int | None = None) -> Any:
    """Returns a compiled model, its table in one variable or in `shards` of them."""
    import keras

    kind, options = _OPTIMIZERS[optimizer]
    with strategy.scope() if strategy else contextlib.nullcontext():
        made = getattr(keras.optimizers, kind)(0.01, **options)
        if "LossScale" in optimizer:
            made = keras.optimizers.LossScaleOptimizer(made)
        if shards:
            table = tfdistkit.layers.ShardedEmbedding(_ROWS, _WIDTH, shards=shards)
        else:
            table = keras.layers.Embedding(_ROWS, _WIDTH)
        stack = table, keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((_IDS,), dtype="int32"), *stack])
        model.compile(made, "mse", jit_compile=False)
    return model


def batches(count: int) -> Any:
    """Returns a dataset of `count` batches."""
    import numpy as np
    import tensorflow as tf

    random = np.random.RandomState(0)
    ids = random.randint(0, _ROWS, (_BATCH, _IDS)).astype("int32")
    return tf.data.Dataset.from_tensors((ids, random.rand(_BATCH, 1).astype("float32"))).repeat(count)


def rate(model: Any, steps: int) -> Callable[[], float]:
    """Returns a call that trains for some steps and returns steps per second."""
    data = batches(steps)

    def run() -> float:
        start = time.perf_counter()
        model.fit(data, epochs=1, verbose=0)
        return steps / (time.perf_counter() - start)

    return run


def compare_rates(rounds: int, steps: int) -> None:
    """Prints the rates of the variants, for each optimizer that can update single rows."""
    ours = tfdistkit.strategy("one_device")
    for optimizer in ("SGD", "Adagrad"):
        variants = {
            f"{optimizer}, stock": rate(trained(None, optimizer), steps),
            f"{optimizer}, ours": rate(trained(ours, optimizer), steps),
            f"{optimizer}, 4 shards": rate(trained(ours, optimizer, 4), steps),
        }
        pairs.show(pairs.in_turn(variants, rounds), f"{optimizer}, stock", "/s")


def copies(way: str, optimizer: str) -> float:
    """Returns the peak number of copies of the table, or of tensors of its size, in a step."""
    import tensorflow as tf

    model = trained(tfdistkit.strategy("one_device") if way == "ours" else None, optimizer)
    model.fit(batches(1), verbose=0)  # Makes the slots, but may leave free memory behind.
    model.fit(batches(1), verbose=0)
    table_bytes = _ROWS * _WIDTH * 4
    filled: list[Any] = []
    grew = 0
    while grew < 2:
        before = _resident_bytes()
        filled.append(tf.fill((_ROWS, _WIDTH), float(len(filled))))
        grew += _resident_bytes() - before > 0.9 * table_bytes
    before = _resident_bytes()
    model.fit(batches(3), verbose=0)
    return (_resident_bytes() - before) / table_bytes


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def compare_copies() -> None:
    """Prints the table of `docs/layers.md`."""
    print("| optimizer | stock | ours |\n|---|---|---|")
    for optimizer in _OPTIMIZERS:
        cells = []
        for way in ("stock", "ours"):
            command = [sys.executable, __file__, "--copies-of", way, optimizer]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
            cells.append(f"{float(ended.stdout.split()[-1]):.1f}")
        print(f"| {optimizer} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--copies", action="store_true", help="count the copies in a step, instead of steps per second")
    parser.add_argument("--copies-of", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.copies_of:
        print(copies(*args.copies_of))
    elif args.copies:
        compare_copies()
    else:
        compare_rates(args.rounds, args.steps)


if __name__ == "__main__":
    main()
