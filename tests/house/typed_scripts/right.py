"""What type checkers let pass, with the types that come out of it."""

import os
import sys
from pathlib import Path
from typing import Any, Literal

import tfdistkit
from tfdistkit import callbacks
from tfdistkit.strategies import StrategyName


def train(rate: float, name: str = "adam") -> float:
    return rate if name else 0.0


def train_by_name(*, rate: float) -> str:
    return str(rate)


def count(*rows: int) -> int:
    return len(rows)


def build(cluster: tfdistkit.cluster.ClusterSpec, *, size: int = 1) -> Any:
    return cluster.world_size * size


class Training:
    def run(self, epochs: int) -> bytes:
        return bytes(epochs)


who: int = tfdistkit.rank() + tfdistkit.local_rank() + tfdistkit.world_size()
chief: bool = tfdistkit.is_chief()

with tfdistkit.strategy().scope():
    pass
tfdistkit.strategy("auto", timeout_s=30, devices=2, op="sum", communication="ring", check_data=False)
tfdistkit.strategy(name="auto")
for spelling in ("one_device", "off"):
    tfdistkit.strategy(StrategyName(spelling))
tfdistkit.strategy("one_device", devices="GPU:0")
tfdistkit.strategy("mirrored", devices=["GPU:0", "GPU:1"])
tfdistkit.strategy("dp", devices=2)
tfdistkit.strategy("central_storage", devices=("GPU:0", "GPU:1"), parameter_device="CPU:0")
tfdistkit.strategy("multiworker", communication="nccl", timeout_s=30, check_data=False)
tfdistkit.strategy("ddp")
tfdistkit.strategy("multi_worker_mirrored")
tfdistkit.strategy("horovod", op="adasum", compression="none", process_set=[[0, 1], [2, 3]], timeline=Path("a.json"))
tfdistkit.strategy("horovod", process_set=[0, 1], fusion_threshold_bytes=1 << 20, cycle_time_ms=1, autotune=True)
tfdistkit.strategy("parameter_server", max_inflight_per_worker=2, timeout_s=30.5, heartbeat_timeout_s=10)
tfdistkit.strategy("ps", variable_partitioner=None, synchronous=False)
# Names that type checkers cannot know: registered ones, and those of a configuration.
tfdistkit.strategy(tfdistkit.register_strategy("mine", build), size=7)
tfdistkit.strategy(StrategyName(sys.argv[1]), devices=2)
chosen: Literal["mirrored", "multiworker"] = "mirrored" if who else "multiworker"
tfdistkit.strategy(chosen)
options: dict[str, Any] = {"timeout_s": 30}
tfdistkit.strategy("multiworker", **options)

floats: list[float] = tfdistkit.launch(train, (0.1,))
floats = tfdistkit.launch(train, args=(0.1, "sgd"), np=2, timeout_s=60, env=dict(os.environ), log_dir=Path("logs"))
floats = tfdistkit.launch(train, [0.1, "sgd"], 2, threads_per_worker=1, backend="mpi", max_restarts=1)
floats = tfdistkit.launch(train, (0.1,), kwargs={"name": "sgd"})
strings: list[str] = tfdistkit.launch(train_by_name, kwargs={"rate": 0.1})
integers: list[int] = tfdistkit.launch(count) + tfdistkit.launch(count, (1, 2, 3)) + tfdistkit.launch(tfdistkit.rank)
integers = tfdistkit.launch(lambda rows: len(rows), ([1, 2],))
folders: list[bytes] = tfdistkit.launch(Training().run, (3,))
of_coordinator: float = tfdistkit.launch(train, (0.1,), np=2, ps=1)
anything = tfdistkit.launch(train, (0.1,), **options)

saving = callbacks.ChiefCheckpoint("a.keras", keep=2)
resuming = callbacks.BackupAndResume("backups")
