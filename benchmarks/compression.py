"""Bytes and results of training with each compression and algorithm, on two workers over TensorFlow's ring.

Two tasks: scikit-learn's digits by an MLP of 85,000 weights, 20 epochs, and the next character of Python's own sources
by one of 250,000 with AdamW, 2 epochs. Bytes are those that the loopback interface counts, in a network namespace of
its own, so that nothing else sends there; Linux and root. Those of the last epoch count, after every warm-up,
compared with those of `none` in the same run. `Adam` is for comparison with the optimizers that compress momentum.
Run: python benchmarks/compression.py [--tasks digits characters] [--seeds 3] [--only NAME ...] [--save FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMPRESSIONS = {
    "none": "None",
    "FP16()": "c.FP16()",
    "ByteGrad()": "c.ByteGrad()",
    "Int8()": "c.Int8()",
    "PowerSGD(2)": "c.PowerSGD(2)",
    "PowerSGD(4)": "c.PowerSGD(4)",
    "TopK(0.01)": "c.TopK(0.01)",
    "Sign(100)": "c.Sign(100)",
    "Chain(PowerSGD(4), FP16())": "c.Chain(c.PowerSGD(4), c.FP16())",
    # An epoch of digits has 15 steps, one of characters 256.
    "LocalSGD(5)": "a.LocalSGD(5)",
    "LocalSGD(15)": "a.LocalSGD(15)",
    "DiLoCo(15)": "a.DiLoCo(15)",
    "LocalSGD(128)": "a.LocalSGD(128)",
    "DiLoCo(16)": "a.DiLoCo(16)",
    "Decentralized(all)": "a.Decentralized()",
    "Decentralized(all), ByteGrad": "a.Decentralized(compression=c.ByteGrad())",
    "Decentralized(shift_one)": "a.Decentralized('shift_one')",
    "Decentralized(shift_one), Int8": "a.Decentralized('shift_one', compression=c.Int8())",
    "DiLoCo(5)": "a.DiLoCo(5)",
    "DiLoCo(5), ByteGrad": "a.DiLoCo(5, compression=c.ByteGrad())",
    "DiLoCo(5), 3 fragments": "a.DiLoCo(5, fragments=3)",
    "DiLoCo(5), 3 fragments, delay": "a.DiLoCo(5, fragments=3, delay=1)",
    # Optimizers; the steps until the variance is frozen are a fifth of all.
    "Adam": "keras.optimizers.Adam(1e-3)",
    "OneBitAdam": "c.OneBitAdam(1e-3, freeze_after=total // 5)",
    "QAdam": "c.QAdam(1e-3, warmup_steps=total // 5)",
}

_SCRIPT = """
import glob, json, os, sys
import tfdistkit
from tfdistkit import algorithms as a, compression as c
task, seeds, given, times = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
strategy = tfdistkit.strategy("multiworker", communication="ring")
import keras, numpy as np, tensorflow as tf

def digits():
    from sklearn.datasets import load_digits
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype("float32"), y[order]
    layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
    make = lambda: keras.Sequential([keras.Input((64,)), *layers])
    return (x[:1437], y[:1437]), (x[1437:], y[1437:]), 96, 20, make, lambda: keras.optimizers.SGD(0.05, momentum=0.9)

def characters(length=24):
    files = sorted(glob.glob(os.path.dirname(os.__file__) + "/*.py"))
    text = "".join(open(file, errors="ignore").read() for file in files)
    data = np.minimum(np.frombuffer(text.encode("ascii", "ignore"), np.uint8), 127)
    random, block = np.random.default_rng(0), 4096
    held = np.arange(len(data) // block) % 8 == 0
    def cut(blocks, number):
        begin = random.choice(blocks, number) * block + random.integers(0, block - length - 1, number)
        windows = data[begin[:, None] + np.arange(length + 1)].astype("int32")
        return windows[:, :length], windows[:, length]
    layers = [keras.layers.Embedding(128, 24), keras.layers.Flatten(), keras.layers.Dense(256, "relu"),
              keras.layers.Dense(256, "relu"), keras.layers.Dense(128)]
    make = lambda: keras.Sequential([keras.Input((length,), dtype="int32"), *layers])
    rows = cut(np.flatnonzero(~held), 1 << 16), cut(np.flatnonzero(held), 8192)
    return *rows, 256, 2, make, lambda: keras.optimizers.AdamW(1e-3)

def received():
    with open("/proc/net/dev") as file:
        return next(int(line.split()[1]) for line in file if line.strip().startswith("lo:"))

class Bytes(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.begin = received()
    def on_epoch_end(self, epoch, logs=None):
        self.each = received() - self.begin

for seed in range(seeds):
    for name, code in given.items():
        keras.utils.set_random_seed(seed)
        (x, y), (x_held, y_held), batch, epochs, make, optimizer = {"digits": digits, "characters": characters}[task]()
        epochs *= times
        total = -(-len(x) // batch) * epochs
        with strategy.scope():
            chosen = eval(code)
        own = isinstance(chosen, keras.optimizers.Optimizer)
        strategy.reducer = tfdistkit.communication.Average() if own or chosen is None else chosen
        with strategy.scope():
            model = make()
            model.compile(chosen if own else optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        counted = Bytes()
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed).batch(batch)
        history = model.fit(data, epochs=epochs, verbose=0, callbacks=[counted]).history
        logits = np.concatenate([model(x_held[i:i + 1024]).numpy() for i in range(0, len(x_held), 1024)])
        loss = keras.losses.sparse_categorical_crossentropy(y_held, logits, from_logits=True)
        if tfdistkit.is_chief():
            found = {"name": name, "bytes": counted.each, "loss": float(np.mean(loss)),
                     "accuracy": float((logits.argmax(1) == y_held).mean()), "curve": history["loss"]}
            print("found " + json.dumps(found), flush=True)
"""
_DEADLINE_S = 3600


def train(task: str, seeds: int, names: list[str], times: int) -> list[dict[str, Any]]:
    """Trains with each compression or algorithm and seed on two workers; returns what rank 0 found of each."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(_SCRIPT)
        given = json.dumps({name: COMPRESSIONS[name] for name in names})
        job = [sys.executable, "-m", "tfdistkit", "run", "-np", "2", str(script), task, str(seeds), given, str(times)]
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *job],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
    if done.returncode:
        raise SystemExit(f"failed: {done.stdout}\n{done.stderr}")
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "found {" in line]
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=["digits", "characters"], default=["digits", "characters"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--times", type=int, default=1, help="how many times as many epochs")
    parser.add_argument("--only", nargs="+", choices=list(COMPRESSIONS), default=list(COMPRESSIONS))
    parser.add_argument("--save", type=Path, help="a file for what was found, which pictures.py draws")
    args = parser.parse_args()
    saved = {}
    for task in args.tasks:
        found = train(task, args.seeds, ["none", *(name for name in args.only if name != "none")], args.times)
        whole = statistics.median(one["bytes"] for one in found if one["name"] == "none")
        print(f"{task}, {args.seeds} seeds: bytes against none, loss and accuracy on held-out rows (medians)")
        saved[task] = {}
        for name in dict.fromkeys(one["name"] for one in found):
            own = [one for one in found if one["name"] == name]
            size, loss, accuracy = (
                statistics.median(float(one[key]) for one in own) for key in ("bytes", "loss", "accuracy")
            )
            print(f"  {name:<32} {size / whole:>7.3f} {loss:>8.4f} {accuracy:>7.4f}", flush=True)
            curve = [statistics.median(losses) for losses in zip(*(one["curve"] for one in own))]
            saved[task][name] = {"bytes": size / whole, "loss": loss, "accuracy": accuracy, "curve": curve}
    if args.save is not None:
        args.save.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    main()
