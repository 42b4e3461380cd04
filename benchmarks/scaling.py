"""Scaling from 1 to 2 workers of one thread each: a compute-bound convolutional net, with the same batch per worker.

Runs take turns: one worker; two independent processes, which shows the cost of sharing the machine; two workers of
`multiworker`; with `--horovod` two of Horovod too. Efficiency is examples per second of two over twice those of one.
The loss relative to two independent processes is communication. Goal: 0.90.
Run: python benchmarks/scaling.py --horovod
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

_BACKENDS = {"horovod": "horovod"}
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}


def train(args: argparse.Namespace) -> None:
    """Trains as one worker, and writes examples per second of each round."""
    import time

    import tfdistkit

    strategy = tfdistkit.strategy(args.strategy)
    import keras
    import tensorflow as tf

    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                *(layers.Conv2D(width, 3, padding="same", activation="relu") for width in (32, 32, 64, 64)),
                layers.GlobalAveragePooling2D(),
                layers.Dense(10),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    workers = strategy.num_replicas_in_sync
    rows = args.batch * workers
    data = tf.data.Dataset.from_tensors(
        (tf.random.stateless_normal((rows, 32, 32, 3), (1, 2)), tf.zeros((rows,), tf.int32))
    ).repeat(args.steps)
    model.fit(data.take(2), verbose=0)
    start = time.perf_counter()
    model.fit(data, verbose=0)
    rate = rows * args.steps / (time.perf_counter() - start)
    Path(args.out, f"{os.getpid()}.json").write_text(json.dumps({"rate": rate, "workers": workers}))


def measure(processes: int, strategy: str, args: argparse.Namespace) -> float:
    """Runs the workers of one kind and returns their examples per second in total."""
    together = strategy != "one_device"
    with tempfile.TemporaryDirectory() as out:
        sizes = ["--batch", str(args.batch), "--steps", str(args.steps)]
        worker = [__file__, "--strategy", strategy, "--out", out, *sizes]
        env = {**os.environ, **_THREADS}
        launcher = [sys.executable, "-m", "tfdistkit", "run", "--backend", _BACKENDS.get(strategy, "local")]
        if together:
            jobs = [[*launcher, "-np", str(processes), *worker]]
        else:
            jobs = [[sys.executable, *worker]] * processes
        running = [subprocess.Popen(job, env=env, stdout=subprocess.DEVNULL) for job in jobs]
        if any(job.wait(timeout=600) for job in running):
            raise SystemExit("a worker failed")
        rates = [json.loads(path.read_text())["rate"] for path in Path(out).iterdir()]
        # Workers that train together each see the rate of the whole job.
        return statistics.mean(rates) if together else sum(rates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="rows per worker")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--horovod", action="store_true", help="also measure two workers of Horovod (Gloo)")
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.strategy:
        train(args)
        return
    kinds = {"two independent": "one_device", "two of multiworker": "multiworker"}
    if args.horovod:
        kinds["two of horovod"] = "horovod"
    efficiency: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        one = measure(1, "one_device", args)
        for name, strategy in kinds.items():
            efficiency[name].append(measure(2, strategy, args) / (2 * one))
    alone, *together = efficiency
    for name, values in efficiency.items():
        print(f"{name:<24} efficiency {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    for name in together:
        kept = statistics.median(a / b for a, b in zip(efficiency[name], efficiency[alone]))
        print(f"{name:<24} kept while communicating {kept:.3f}")


if __name__ == "__main__":
    main()
