"""One tensor summed over local processes: multiworker (shm, ring), horovod (Gloo, MPI), raw Horovod, torch, memcpy.

tfdistkit and raw Horovod take turns within one process; the jobs take turns too. Goal: at least 0.95 of the speed of
raw Horovod. Run: python benchmarks/all_reduce.py
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

_SIZES = {"4 kB": 10**3, "1 MB": 250_000, "10 MB": 2_500_000, "100 MB": 25_000_000}
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
_JOBS = {
    "shm": ["--backend", "local"],
    "ring": ["--backend", "local"],
    "horovod Gloo": ["--backend", "horovod"],
    "horovod MPI": ["--backend", "mpi"],
    "torch Gloo": ["--backend", "local"],
}


def seconds(call: Callable[[], object], elements: int) -> float:
    """Returns the median seconds of a call, over fewer calls for larger tensors."""
    times = []
    for _ in range(max(5, min(40, 20_000_000 // elements))):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def calls(job: str) -> dict[str, Callable[[int], Callable[[], object]]]:
    """Returns the variants that a rank of a job measures: name -> elements -> a call that sums them."""
    if job == "torch Gloo":
        import torch
        import torch.distributed as dist

        workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
        torch.set_num_threads(1)
        size = len(workers)
        dist.init_process_group("gloo", f"tcp://{workers[0]}", rank=int(os.environ["TFDISTKIT_RANK"]), world_size=size)

        def by_torch(elements: int) -> Callable[[], object]:
            tensor = torch.ones(elements)
            return lambda: dist.all_reduce(tensor)

        return {"torch Gloo": by_torch}
    import tfdistkit

    over_tensorflow = job in ("shm", "ring")
    strategy = (
        tfdistkit.strategy("multiworker", communication=job) if over_tensorflow else tfdistkit.strategy("horovod")
    )
    import tensorflow as tf

    def ours(elements: int) -> Callable[[], object]:
        variable = tf.Variable(tf.ones(elements))

        @tf.function
        def run() -> tf.Tensor:
            tensor = variable.read_value()
            return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tensor))

        return run

    def memory_copy(elements: int) -> Callable[[], object]:
        tensor = tf.ones(elements).numpy()
        return tensor.copy

    if over_tensorflow:
        return {job: ours} if job == "ring" else {job: ours, "memory copy": memory_copy}
    import horovod.tensorflow as hvd

    def raw(elements: int) -> Callable[[], object]:
        variable = tf.Variable(tf.ones(elements))
        return tf.function(lambda: hvd.grouped_allreduce([variable.read_value()], op=hvd.Sum)[0])

    return {job: ours, f"raw {job}": raw}


def worker(job: str, out: str) -> None:
    measured: dict[str, dict[str, float]] = {}
    made = calls(job)
    for size, elements in _SIZES.items():
        ready = {name: make(elements) for name, make in made.items()}
        for call in ready.values():
            call()
        for name, call in ready.items():
            measured.setdefault(name, {})[size] = seconds(call, elements)
    if os.environ["TFDISTKIT_RANK"] == "0":
        Path(out).write_text(json.dumps(measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", nargs="+", default=list(_JOBS), choices=list(_JOBS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    rounds: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.rounds):
        for job in args.jobs:
            with tempfile.NamedTemporaryFile() as out:
                command = [sys.executable, "-m", "tfdistkit", "run", *_JOBS[job], "-np", str(args.ranks), __file__]
                done = subprocess.run([*command, "--worker", job, out.name], env={**os.environ, **_THREADS},
                                      capture_output=True, timeout=600)  # fmt: skip
                if done.returncode:
                    print(f"{job}: not measured: {done.stderr.decode().strip().splitlines()[-1:]}")
                    continue
                for name, sizes in json.loads(Path(out.name).read_text()).items():
                    for size, value in sizes.items():
                        rounds.setdefault(name, {}).setdefault(size, []).append(value)
    print(f"{'median milliseconds':<22}" + "".join(f"{size:>12}" for size in _SIZES))
    for name, sizes in rounds.items():
        print(f"{name:<22}" + "".join(f"{statistics.median(sizes[s]) * 1e3:>12.3f}" for s in _SIZES))
    for name in [name for name in rounds if name not in ("shm", "memory copy") and "shm" in rounds]:
        pairs = {s: zip(rounds[name][s], rounds["shm"][s]) for s in _SIZES}
        speeds = (f"{statistics.median(other / shm for other, shm in pairs[s]):>12.2f}" for s in _SIZES)
        print(f"{'speed of shm over ' + name:<22}" + "".join(speeds))
    for name in ("horovod Gloo", "horovod MPI"):
        if name in rounds:
            pairs = {s: zip(rounds[f"raw {name}"][s], rounds[name][s]) for s in _SIZES}
            speeds = (f"{statistics.median(raw / ours for raw, ours in pairs[s]):>12.3f}" for s in _SIZES)
            print(f"{'speed over raw: ' + name[8:]:<22}" + "".join(speeds))


if __name__ == "__main__":
    main()
