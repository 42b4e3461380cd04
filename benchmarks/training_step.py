"""A training step on 2 workers of one thread: ours over Horovod against a raw Horovod loop, multiworker, torch DDP.

Three models: MLPs of 1M and of 25M parameters, and a small convolutional net. Each is trained by `fit` and by a loop,
because the overhead of `fit` in every step (data, callbacks, logs) is independent of the all-reduce. Ours and raw
Horovod take turns within one process, the jobs take turns too. Goal: ours at least 0.95 of raw steps per second.
Run: python benchmarks/training_step.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
_OWN = {"TFDISTKIT_OWN_MODELS": "1"}  # Raw Horovod trains models that are in no strategy.
_JOBS = {"horovod Gloo": "horovod", "horovod MPI": "mpi", "multiworker": "local", "torch DDP": "local"}
# Model -> shape of a row, timed steps in a round. 32 rows a worker.
_MODELS: dict[str, tuple[tuple[int, ...], int]] = {
    "MLP 1M": ((512,), 240),
    "MLP 25M": ((1024,), 24),
    "conv net": ((32, 32, 3), 90),
}
_ROWS = 32
_WIDTHS = {"MLP 1M": (1000, 500, 10), "MLP 25M": (4096, 4096, 1000)}

# Runs a number of steps, to be timed.
Run = Callable[[int], object]


def timed(run: Run, steps: int) -> float:
    """Returns steps per second."""
    start = time.perf_counter()
    run(steps)
    return steps / (time.perf_counter() - start)


def keras_model(name: str) -> Any:
    import keras

    layers, shape = keras.layers, _MODELS[name][0]
    if name == "conv net":
        hidden = [layers.Conv2D(width, 3, padding="same", activation="relu") for width in (32, 32, 64)]
        return keras.Sequential([keras.Input(shape), *hidden, layers.GlobalAveragePooling2D(), layers.Dense(10)])
    *widths, last = _WIDTHS[name]
    hidden = [layers.Dense(width, activation="relu") for width in widths]
    return keras.Sequential([keras.Input(shape), *hidden, layers.Dense(last)])


def rows(name: str, workers: int) -> tuple[Any, Any]:
    import tensorflow as tf

    x = tf.random.stateless_normal((_ROWS * workers, *_MODELS[name][0]), (1, 2))
    return x, tf.zeros((_ROWS * workers,), tf.int32)


def compiled(model: Any) -> Any:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss)
    return model


def fit_by(model: Any, name: str, workers: int) -> Run:
    import tensorflow as tf

    data = tf.data.Dataset.from_tensors(rows(name, workers)).repeat()
    return lambda steps: model.fit(data.take(steps), verbose=0)


def ours_by_fit(strategy: Any, name: str) -> Run:
    with strategy.scope():
        model = compiled(keras_model(name))
    return fit_by(model, name, strategy.num_replicas_in_sync)


def ours_by_loop(strategy: Any, name: str) -> Run:
    import tensorflow as tf

    with strategy.scope():
        model = compiled(keras_model(name))
        model.optimizer.build(model.trainable_variables)

    def replica_step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        return strategy.run(replica_step, args=(batch,))

    data = tf.data.Dataset.from_tensors(rows(name, strategy.num_replicas_in_sync)).repeat()
    iterator = iter(strategy.distribute_batches(data))

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = step(next(iterator))
        loss.numpy()

    return run


def raw_by_fit(name: str) -> Run:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    plain = keras_model(name)

    class Raw(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            self._loss_tracker.update_state(loss)
            gradients = hvd.grouped_allreduce(tape.gradient(loss, self.trainable_variables))
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": self._loss_tracker.result()}

    return fit_by(compiled(Raw(plain.inputs, plain.outputs)), name, 1)


def raw_by_loop(name: str) -> Run:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    model = compiled(keras_model(name))

    @tf.function
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        gradients = hvd.grouped_allreduce(tape.gradient(loss, model.trainable_variables))
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    iterator = iter(tf.data.Dataset.from_tensors(rows(name, 1)).repeat())

    def run(steps: int) -> None:
        for _ in range(steps):
            loss = step(*next(iterator))
        loss.numpy()

    return run


def torch_ddp(name: str) -> Run:
    import torch
    from torch import nn

    def weighted(name: str) -> Any:
        if name == "conv net":
            widths = (3, 32, 32, 64)
            hidden = [m for a, b in zip(widths, widths[1:]) for m in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]
            return nn.Sequential(*hidden, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        widths = (_MODELS[name][0][0], *_WIDTHS[name])
        layers = [m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    model = nn.parallel.DistributedDataParallel(weighted(name))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loss_of = nn.CrossEntropyLoss()
    shape = _MODELS[name][0]
    x = torch.randn(_ROWS, *(reversed(shape) if len(shape) > 1 else shape))
    y = torch.zeros(_ROWS, dtype=torch.long)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    return run


def variants(job: str) -> dict[str, Callable[[str], Run]]:
    """Returns the variants that a rank of a job measures: name -> model -> a run of some steps."""
    if job == "torch DDP":
        import torch
        import torch.distributed as dist

        workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"tcp://{workers[0]}", rank=int(os.environ["TFDISTKIT_RANK"]), world_size=2)
        return {job: torch_ddp}
    import tfdistkit

    strategy = tfdistkit.strategy("multiworker" if job == "multiworker" else "horovod")
    made: dict[str, Callable[[str], Run]] = {
        f"{job}, fit": lambda name: ours_by_fit(strategy, name),
        f"{job}, loop": lambda name: ours_by_loop(strategy, name),
    }
    if job.startswith("horovod"):
        made |= {f"raw {job}, fit": raw_by_fit, f"raw {job}, loop": raw_by_loop}
    return made


def worker(job: str, out: str, turns: int) -> None:
    measured: dict[str, dict[str, list[float]]] = {}
    made = variants(job)
    for model, (_, steps) in _MODELS.items():
        ready = {name: make(model) for name, make in made.items()}
        for run in ready.values():
            run(2)
        for _ in range(turns):
            for name, run in ready.items():
                measured.setdefault(name, {}).setdefault(model, []).append(timed(run, steps))
    if os.environ["TFDISTKIT_RANK"] == "0":
        Path(out).write_text(json.dumps(measured))


def run_job(job: str, turns: int) -> dict[str, dict[str, list[float]]]:
    with tempfile.NamedTemporaryFile() as out:
        command = [sys.executable, "-m", "tfdistkit", "run", "--backend", _JOBS[job], "-np", "2", __file__]
        done = subprocess.run([*command, "--worker", job, out.name, str(turns)], env={**os.environ, **_THREADS, **_OWN},
                              capture_output=True, timeout=600)  # fmt: skip
        if done.returncode:
            print(f"{job}: not measured: {done.stderr.decode().strip().splitlines()[-3:]}")
            return {}
        measured: dict[str, dict[str, list[float]]] = json.loads(Path(out.name).read_text())
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="number of runs of each job")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each variant in a job")
    parser.add_argument("--jobs", nargs="+", default=list(_JOBS), choices=list(_JOBS))
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], args.worker[1], int(args.worker[2]))
        return
    rounds: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.rounds):
        for job in args.jobs:
            for name, models in run_job(job, args.turns).items():
                for model, values in models.items():
                    rounds.setdefault(name, {}).setdefault(model, []).extend(values)
    print(f"{'steps per second':<30}" + "".join(f"{model:>12}" for model in _MODELS))
    for name, models in rounds.items():
        print(f"{name:<30}" + "".join(f"{statistics.median(models[m]):>12.2f}" for m in _MODELS))
    for name in rounds:
        if f"raw {name}" in rounds:
            pairs = {m: zip(rounds[name][m], rounds[f"raw {name}"][m]) for m in _MODELS}
            speeds = (f"{statistics.median(ours / raw for ours, raw in pairs[m]):>12.3f}" for m in _MODELS)
            print(f"{'over raw: ' + name:<30}" + "".join(speeds))


if __name__ == "__main__":
    main()
