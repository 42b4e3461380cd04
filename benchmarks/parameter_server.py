"""`parameter_server`: steps per second with 1 and 2 workers of one thread and one server, against one process.

Models: an MLP of 1M parameters and an embedding-heavy model (a table of 1M x 16), with `steps_per_execution` 1 and 10.
Two more for the speedup of the second worker (goal: 1.7): a compute-bound model whose step takes 20 ms or more, and a
simulated accelerator, whose step waits 25 ms while the cores are free, as when a GPU computes, so that the workers do
not share a device. If tf_keras is installed, legacy Keras with TensorFlow's own strategy runs the same models. Also
prints bytes on the loopback device per step against the rows that a step touches, and the memory of a worker with a
table of 1 GB on the server.
Run: python benchmarks/parameter_server.py
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "4", "OMP_NUM_THREADS": "1"}
_ROWS = 256
# Model -> steps in a measurement.
_MODELS = {"MLP 1M": 60, "embedding": 200, "compute-bound": 40, "accelerator": 80}
_EXECUTIONS = 16
_ACCELERATOR_S = 0.025
_TABLE = (1_000_000, 16)
_LOOKUPS = 4


def build(keras: Any, name: str, table: tuple[int, int]) -> tuple[Any, tuple[int, ...], str]:
    """Returns a model, the shape of an input row, and its dtype."""
    layers = keras.layers
    if name == "embedding":
        lookup = layers.Embedding(*table, embeddings_initializer="zeros")
        model = keras.Sequential([keras.Input((_LOOKUPS,), dtype="int32"), lookup, layers.Flatten(), layers.Dense(1)])
        return model, (_LOOKUPS,), "int32"
    if name == "MLP 1M":
        hidden = [layers.Dense(1000, activation="relu"), layers.Dense(500, activation="relu")]
        return keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(1)]), (512,), "float32"
    if name == "accelerator":
        model = keras.Sequential([keras.Input((64,)), waiting(layers.Layer)(), layers.Dense(256), layers.Dense(1)])
        return model, (64,), "float32"
    hidden = [layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(3)]
    last = [layers.GlobalAveragePooling2D(), layers.Dense(1)]
    return keras.Sequential([keras.Input((16, 16, 3)), *hidden, *last]), (16, 16, 3), "float32"


def waiting(base: Any) -> Any:
    """Returns a layer that sleeps in the worker's graph, because Python functions do not run on workers."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    class Waiting(base):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            # Depends on the inputs, or constant folding would run it only once.
            data = tf.data.Dataset.from_tensors(tf.stop_gradient(inputs))
            # Sleeps twice: for the element and for the end of the dataset.
            delayed = data.apply(testing.sleep(int(1e6 * _ACCELERATOR_S / 2)))
            with tf.control_dependencies([delayed.get_single_element()]):
                return tf.identity(inputs)

    return Waiting


def loopback_bytes() -> int:
    import psutil

    sent: int = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
    return sent


def worker_memory() -> int:
    """Returns the resident bytes of the largest process that runs this file as a worker of the job."""
    import psutil

    sizes = [0]
    for process in psutil.process_iter(["environ", "memory_info"]):
        variables = process.info["environ"] or {}
        same_job = variables.get("TFDISTKIT_JOB_ID") == os.environ["TFDISTKIT_JOB_ID"]
        if same_job and '"type": "worker"' in variables.get("TF_CONFIG", "") and "TFDISTKIT_TASK_DIR" in variables:
            sizes.append(process.info["memory_info"].rss)
    return max(sizes)


def legacy_strategy() -> Any:
    """Returns TensorFlow's own strategy for legacy Keras; in workers and servers, serves without returning."""
    import tensorflow as tf

    task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if task == "chief":
        return tf.distribute.ParameterServerStrategy(resolver)
    server = tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id,
                                  protocol="grpc")  # fmt: skip
    server.join()


def repeated(rows: Any, _: Any = None) -> Any:
    """Returns an endless dataset."""
    import tensorflow as tf

    # TensorFlow's autotune thread can delay the end of a pipeline until its next turn, in plain Keras too: of 12 fits
    # of 5.1 s, 3 took 10.22 s.
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors(rows).repeat().with_options(options)


def measure(args: argparse.Namespace) -> None:
    """Trains each model, and writes its measurements as JSON (the training script of the job)."""
    import tfdistkit

    legacy = args.how == "legacy"
    strategy = None
    if legacy:
        strategy = legacy_strategy()
    else:
        strategy = tfdistkit.strategy("one_device" if args.how == "one_device" else "parameter_server")
    import numpy as np
    import tensorflow as tf

    if legacy:
        import tf_keras as keras
    else:
        import keras
    found: dict[str, Any] = {}
    names = [args.only] if args.only else list(_MODELS)
    for name in names:
        table = (args.table_rows, _TABLE[1])
        with strategy.scope():
            model, shape, dtype = build(keras, name, table)
            model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=args.spe)
        draw = np.random.default_rng(0)
        x = draw.integers(0, table[0], (_ROWS, *shape)) if dtype == "int32" else draw.normal(size=(_ROWS, *shape))
        rows = (tf.constant(x.astype(dtype)), tf.zeros((_ROWS, 1)))
        # Enough executions that the last one, which runs on a single worker, does not matter.
        steps = max(_MODELS[name], _EXECUTIONS * args.spe)
        data: Any = repeated(rows)
        if args.how == "reading":
            data = strategy.distribute_datasets_from_function(functools.partial(repeated, rows))
        if legacy:
            data = keras.utils.experimental.DatasetCreator(functools.partial(repeated, rows))
        # Warm-up: each worker has run some steps.
        model.fit(data, steps_per_epoch=4 * tfdistkit.world_size() * args.spe, verbose=0)
        before, start = loopback_bytes(), time.perf_counter()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        seconds = time.perf_counter() - start
        found[name] = {"rate": steps / seconds, "bytes": (loopback_bytes() - before) / steps}
        if args.only:
            found["worker_bytes"] = worker_memory()
    Path(args.out).write_text(json.dumps(found))


def run(how: str, workers: int, spe: int, *more: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        start = [sys.executable, "-m", "tfdistkit", "run", "-np", str(max(1, workers))]
        command = [*start, *(["--ps", "1"] if workers else []), __file__, "--how", how, "--spe", str(spe)]
        done = subprocess.run([*command, "--out", str(out), *more], env={**os.environ, **_THREADS},
                              capture_output=True, timeout=600)  # fmt: skip
        if done.returncode:
            raise SystemExit(done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:])
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def has_legacy() -> bool:
    import importlib.util

    return importlib.util.find_spec("tf_keras") is not None


def print_ratios(
    what: str, above: str, below: str, spe: int, rates: dict[tuple[str, int, str], list[float]], models: list[str]
) -> None:
    """Prints the medians of ratios within a round."""
    print(f"{what:<26}", end="")
    for name in models:
        pairs = zip(rates[above, spe, name], rates[below, spe, name])
        print(f"{statistics.median(one / other for one, other in pairs):>16.2f}", end="")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--how", help=argparse.SUPPRESS)
    parser.add_argument("--spe", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=_MODELS, help="measure one model only")
    parser.add_argument("--reading", action="store_true", help="also measure workers that read their own data")
    parser.add_argument("--table-rows", type=int, default=_TABLE[0], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.how:
        measure(args)
        return
    kinds = {"one process": ("one_device", 0), "ours, 1 worker": ("ours", 1), "ours, 2 workers": ("ours", 2)}
    if args.reading:  # As the workers of legacy Keras do.
        kinds |= {"ours, 1 that reads": ("reading", 1), "ours, 2 that read": ("reading", 2)}
    if has_legacy():
        kinds |= {"legacy, 1 worker": ("legacy", 1), "legacy, 2 workers": ("legacy", 2)}
    models = [args.only] if args.only else list(_MODELS)
    rates: dict[tuple[str, int, str], list[float]] = {}
    moved: list[float] = []
    for _ in range(args.rounds):
        for spe in (1, 10):
            for kind, (how, workers) in kinds.items():
                found = run(how, workers, spe, *(["--only", args.only] if args.only else []))
                for name in models:
                    rates.setdefault((kind, spe, name), []).append(found[name]["rate"])
                if kind == "ours, 1 worker" and spe == 1 and "embedding" in models:
                    moved.append(found["embedding"]["bytes"])
    for spe in (1, 10):
        print(f"{f'steps per second, spe={spe}':<26}" + "".join(f"{name:>16}" for name in models))
        for kind in kinds:
            print(f"{kind:<26}" + "".join(f"{statistics.median(rates[kind, spe, n]):>16.1f}" for n in models))
        print_ratios("2 workers over 1", "ours, 2 workers", "ours, 1 worker", spe, rates, models)
        if has_legacy():
            print_ratios("1 worker over legacy", "ours, 1 worker", "legacy, 1 worker", spe, rates, models)
            print_ratios("2 workers over legacy", "ours, 2 workers", "legacy, 2 workers", spe, rates, models)
    if "embedding" not in models:
        return
    touched = _ROWS * _LOOKUPS * _TABLE[1] * 4
    print(f"embedding: {statistics.median(moved):,.0f} bytes moved per step; the rows of a step hold {touched:,}")
    large = run("ours", 1, 1, "--only", "embedding", "--table-rows", str(16 * _TABLE[0]))
    print(f"memory of a worker with a table of 1.02 GB on the server: {large['worker_bytes'] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
