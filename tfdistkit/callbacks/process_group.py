"""The processes that train a model together, as a callback talks to them: outside of a step, in numbers."""

from __future__ import annotations

import functools
import inspect
import logging

import keras
import numpy as np
import tensorflow as tf

# Bounds the copies in memory: many GB go in pieces.
PIECE_BYTES = 64 * 2**20

_LOG = logging.getLogger(__name__)

# How far above a callback its list is: the list, and one frame for each callback that wraps another.
_MOST_FRAMES = 12


class Ranks:
    """What the callbacks of all ranks tell each other. Every method is a collective: all ranks call it.

    Args:
        strategy: Any strategy of tf.distribute; only its public methods are used.
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
    def alone(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.size == 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Adds up what all ranks bring.

        Args:
            values: A vector of int64, of the same length on every rank.

        Returns:
            The sum, on every rank.
        """
        return values if self.alone else self._add(tf.constant(values)).numpy()

    def any(self, value: bool) -> bool:
        """Returns whether `value` is true on one rank at least."""
        return bool(self.sum(np.array([value], np.int64))[0])

    def gather(self, row: np.ndarray) -> np.ndarray:
        """Shows every rank what each brings, bit for bit.

        Args:
            row: A vector of 8-byte numbers, of the same length on every rank.

        Returns:
            One row for each rank, in their order.
        """
        table: np.ndarray = np.zeros([self.size, len(row)], np.int64)
        table[self.rank] = row.view(np.int64)
        return self.sum(table.reshape(-1)).reshape(table.shape).view(row.dtype)

    def share(self, data: bytes, root: int) -> bytes:
        """Gives every rank the bytes of one.

        Args:
            data: What `root` has; what the others give is ignored.
            root: Whose bytes they are.
        """
        is_root = self.rank == root
        length = int(self.sum(np.array([len(data) if is_root else 0], np.int64))[0])
        packed: np.ndarray = np.zeros(-(-length // 8) * 8, np.uint8)
        if is_root:
            packed[:length] = np.frombuffer(data, np.uint8)
        for start in range(0, len(packed), PIECE_BYTES):
            piece = packed[start : start + PIECE_BYTES]
            # The others add zeros, to whole numbers: no bit can change.
            piece[:] = self.sum(piece.view(np.int64)).view(np.uint8)
        return packed[:length].tobytes()


def ranks_of(model: keras.Model) -> Ranks:
    """Returns the ranks that train `model`: those of the strategy in whose scope it was made."""
    return ranks_of_strategy(model.distribute_strategy)


@functools.lru_cache(maxsize=4)  # The callbacks of a job share one graph.
def ranks_of_strategy(strategy: tf.distribute.Strategy) -> Ranks:
    """Returns the ranks of a strategy."""
    return Ranks(strategy)


@functools.cache
def tell_once(message: str) -> None:
    """Logs that a callback has nothing to do; once in a process."""
    _LOG.warning(message)


def list_of(callback: keras.callbacks.Callback) -> list[keras.callbacks.Callback] | None:
    """Finds the callbacks of the `fit` that has just called `callback`.

    Keras does not tell a callback what stands beside it, so this looks for the list up the call stack.

    Returns:
        All callbacks in their order; None if it is called by something else than a `CallbackList`.
    """
    frame = inspect.currentframe()
    for _ in range(_MOST_FRAMES):
        frame = frame.f_back if frame else None
        caller = frame.f_locals.get("self") if frame else None
        if isinstance(caller, keras.callbacks.CallbackList):
            return list(caller.callbacks)
    return None
