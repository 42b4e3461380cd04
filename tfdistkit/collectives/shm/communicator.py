"""Runs the collectives of user code through shared memory, which has an operation for most of them."""

from __future__ import annotations

import tensorflow as tf

from tfdistkit.collectives.communicators import Communicator
from tfdistkit.collectives.shm.transport import SharedMemoryTransport

_SUM = tf.distribute.ReduceOp.SUM


class SharedMemoryCommunicator(Communicator):
    """Runs collectives between the ranks of one host.

    Args:
        transport: What moves the tensors.
    """

    name = "shared memory"

    def __init__(self, transport: SharedMemoryTransport):
        super().__init__(transport.size)
        self._transport = transport

    def rank(self) -> tf.Tensor:
        """Returns this rank, a scalar int32 tensor."""
        return tf.constant(self._transport.rank)

    def sum(self, tensors: list[tf.Tensor], timeout_s: float | None = None) -> list[tf.Tensor]:
        """Sums tensors over the ranks, one operation for each dtype; waits `timeout_s` for its peers, if given."""
        return self._transport.all_reduce(tensors, _SUM, timeout_s)

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates along axis 0, in rank order; lengths may differ."""
        return self._transport.all_gather(tensor)

    def broadcast(self, tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
        """Returns the tensor of `root_rank`."""
        return self._transport.broadcast(tensor, root_rank)

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows to rank r; returns the received rows, in rank order, and how many came from each."""
        return self._transport.all_to_all(tensor, splits)
