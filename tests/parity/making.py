"""Makes the strategy of an engine in this process. A new strategy is one row here."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import tfdistkit
from tfdistkit.collectives.shm import peers
from tfdistkit.strategies.sync.transports import hierarchical


def own_rank() -> int:
    """Returns this process's rank; 0 for a single process."""
    return tfdistkit.rank()


def logical_cpus(number: int) -> list[str]:
    """Splits the CPU into logical devices before TensorFlow initializes it, and returns their names."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
    return [f"CPU:{i}" for i in range(number)]


def _stock_mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(logical_cpus(2))


def _stock_central_storage() -> tf.distribute.Strategy:
    return tf.distribute.experimental.CentralStorageStrategy(logical_cpus(2), "CPU:0")


def _hierarchical() -> tf.distribute.Strategy:
    """Two ranks that say that they are on one host, and a third on another; all sums count as large."""
    host = 1 + own_rank() // 2
    peers.host_id = lambda: host
    hierarchical.LARGE_BYTES = 1
    return tfdistkit.strategy("multiworker", timeout_s=60, communication="hierarchical")


def _in_buckets(name: str, **options: Any) -> tf.distribute.Strategy:
    """Makes a strategy of several processes that sums nearly each gradient by itself, as those of large models."""
    strategy = tfdistkit.strategy(name, timeout_s=60, **options)
    strategy.fusion_bytes = 256
    return strategy


ENGINES = {
    "one": tf.distribute.get_strategy,
    "one_device": lambda: tfdistkit.strategy("one_device"),
    "mirrored": lambda: tfdistkit.strategy("mirrored", devices=2),
    "central_storage": lambda: tfdistkit.strategy("central_storage", devices=2),
    "multiworker": lambda: _in_buckets("multiworker", communication="shm"),
    "multiworker_ring": lambda: _in_buckets("multiworker", communication="ring"),
    "multiworker_hierarchical": _hierarchical,
    "horovod": lambda: _in_buckets("horovod"),
    "horovod_mpi": lambda: _in_buckets("horovod"),
    "stock_mirrored": _stock_mirrored,
    "stock_central_storage": _stock_central_storage,
    "stock_multiworker": lambda: tf.distribute.MultiWorkerMirroredStrategy(),
}


def make_strategy(engine: str) -> tf.distribute.Strategy:
    """Makes the strategy of an engine; for `one`, returns TensorFlow's default strategy."""
    return ENGINES[engine]()
