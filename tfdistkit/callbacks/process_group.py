"""The process group of a model: collectives that callbacks run outside of a step."""

from __future__ import annotations

import functools
import inspect
import logging

import keras
import numpy as np
import tensorflow as tf

# Broadcasts in chunks of this size, to bound the copies in memory.
CHUNK_BYTES = 64 * 2**20

_LOG = logging.getLogger(__name__)

# Frames from a callback up to its `CallbackList`: one for the list, and one per wrapping callback.
_MOST_FRAMES = 12


class Ranks:
    """Runs collectives among the callbacks of all ranks. All ranks must call each method.

    Args:
        strategy: Any tf.distribute strategy; only its public methods are used.
    """

    def __init__(self, strategy: tf.distribute.Strategy):
        replicas = strategy.num_replicas_in_sync
        here = len(strategy.extended.worker_devices) if replicas > 1 else 1  # The default strategy has no devices.
        self.size = replicas // here
        self.rank = 0
        if self.size > 1:
            ids = strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(int(context.replica_id_in_sync_group))
            )
            self.rank = int(strategy.experimental_local_results(ids)[0]) // here

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])  # One trace for all lengths.
        def add(values: tf.Tensor) -> tf.Tensor:
            def in_replica(values: tf.Tensor) -> tf.Tensor:
                context = tf.distribute.get_replica_context()
                is_first = tf.equal(context.replica_id_in_sync_group % here, 0)  # Once for each process.
                mine = tf.where(is_first, values, tf.zeros_like(values))
                return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

            return strategy.experimental_local_results(strategy.run(in_replica, args=(values,)))[0]

        self._add = add

    @property
    def is_single(self) -> bool:
        """Whether there is only one process."""
        return self.size == 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sums the vectors of all ranks (all-reduce).

        Args:
            values: A vector of int64, of the same length on every rank.

        Returns:
            The sum, on every rank.
        """
        return values if self.is_single else self._add(tf.constant(values)).numpy()

    def any(self, value: bool) -> bool:
        """Returns whether `value` is true on at least one rank."""
        return bool(self.sum(np.array([value], np.int64))[0])

    def gather(self, row: np.ndarray) -> np.ndarray:
        """Gathers the vectors of all ranks, bit for bit (all-gather).

        Args:
            row: A vector of 8-byte numbers, of the same length on every rank.

        Returns:
            One row per rank, in rank order.
        """
        table: np.ndarray = np.zeros([self.size, len(row)], np.int64)
        table[self.rank] = row.view(np.int64)
        return self.sum(table.reshape(-1)).reshape(table.shape).view(row.dtype)

    def broadcast(self, data: bytes, root: int) -> bytes:
        """Broadcasts the bytes of one rank.

        Args:
            data: The bytes on `root`; ignored on the other ranks.
            root: The rank to broadcast from.
        """
        is_root = self.rank == root
        length = int(self.sum(np.array([len(data) if is_root else 0], np.int64))[0])
        packed: np.ndarray = np.zeros(-(-length // 8) * 8, np.uint8)
        if is_root:
            packed[:length] = np.frombuffer(data, np.uint8)
        for start in range(0, len(packed), CHUNK_BYTES):
            chunk = packed[start : start + CHUNK_BYTES]
            # The other ranks add integer zeros, so no bit changes.
            chunk[:] = self.sum(chunk.view(np.int64)).view(np.uint8)
        return packed[:length].tobytes()


def ranks_of(model: keras.Model) -> Ranks:
    """Returns the process group of the strategy in whose scope `model` was created."""
    return ranks_of_strategy(model.distribute_strategy)


@functools.lru_cache(maxsize=4)  # The callbacks of a job share one graph.
def ranks_of_strategy(strategy: tf.distribute.Strategy) -> Ranks:
    """Returns the process group of a strategy."""
    return Ranks(strategy)


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning, once in a process."""
    _LOG.warning(message)


def list_of(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback] | None:
    """Finds the list of callbacks of the `fit` that is calling `callback`.

    Keras gives a callback no access to its list, so this searches the call stack for it.

    Returns:
        All callbacks in their order; None if the caller is not a `CallbackList`.
    """
    frame = inspect.currentframe()
    for _ in range(_MOST_FRAMES):
        frame = frame.f_back if frame else None
        caller = frame.f_locals.get("self") if frame else None
        if isinstance(caller, keras.callbacks.CallbackList):
            return list(caller.callbacks)
    return None
