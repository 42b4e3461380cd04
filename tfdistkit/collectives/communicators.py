"""The transports of collectives: TensorFlow, Horovod, or none for a single process.

A communicator moves tensors. Gradients, dtypes that must be cast, and validation are in `operations`, once for all
transports. All methods work in eager mode and in graphs, also in branches and loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.collectives.registry import process_count

_SUM = tf.distribute.ReduceOp.SUM


class Communicator:
    """Moves tensors between `size` ranks. A subclass defines `sum` and `rank`; the other methods use these.

    Args:
        size: The number of ranks.
    """

    name = "none"

    def __init__(self, size: int = 1):
        self.size = size

    def rank(self) -> tf.Tensor:
        """Returns this rank, a scalar int32 tensor."""
        return tf.constant(0)

    def sum(self, tensors: list[tf.Tensor], timeout_s: float | None = None) -> list[tf.Tensor]:
        """Sums tensors over the ranks, one operation for each dtype; waits `timeout_s` for its peers, if given."""
        return tensors

    def table(self, row: tf.Tensor, timeout_s: float | None = None) -> tf.Tensor:
        """Returns a table with one row of each rank; all rows have the same shape."""
        place = tf.one_hot(self.rank(), self.size, dtype=row.dtype)
        return self.sum([tf.reshape(place, [self.size] + [1] * row.shape.rank) * row], timeout_s)[0]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates along axis 0, in rank order; lengths may differ.

        Sums tensors that are zero except for the rank's own rows: twice the traffic of a gather. TensorFlow's gather
        traces a function for each call in eager mode (0.1 s), and cannot run in a branch where a process has several
        replicas.
        """
        first, total = self.row_offset(tensor)
        own = tf.shape(tensor)[0]
        padding = [[first, total - first - own]] + [[0, 0]] * (tensor.shape.rank - 1)
        return self.sum([tf.pad(tensor, padding)])[0]

    def row_offset(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the offset of this rank's rows among the rows of all ranks, and the number of rows of all ranks."""
        lengths = self.table(tf.shape(tensor)[0])
        return tf.reduce_sum(lengths[: self.rank()]), tf.reduce_sum(lengths)

    def extreme(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        """Returns the minimum ("min") or the maximum ("max") over the ranks."""
        table = self.gather(tensor[None])
        return tf.reduce_min(table, 0) if op == "min" else tf.reduce_max(table, 0)

    def broadcast(self, tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
        """Returns the tensor of `root_rank`."""
        return self.sum([tf.where(self.rank() == root_rank, tensor, tf.zeros_like(tensor))])[0]

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums, and returns this rank's share of the rows; the first ranks get one more if the division is uneven."""
        return self.own_share(self.sum([tensor])[0])

    def own_share(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns this rank's share of the rows of a tensor that is the same on all ranks."""
        rows = tf.shape(tensor)[0]
        least, more, rank = rows // self.size, rows % self.size, self.rank()
        first = rank * least + tf.minimum(rank, more)
        return tensor[first : first + least + tf.cast(rank < more, tf.int32)]

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows to rank r; returns the received rows, in rank order, and how many came from each."""
        sent = self.table(splits)  # [from, to]
        all_rows, rank = self.gather(tensor), self.rank()
        ends = tf.reshape(tf.cumsum(tf.reshape(sent, [-1])), [self.size, self.size])
        received = sent[:, rank]
        pieces = tf.ragged.range(ends[:, rank] - received, ends[:, rank])
        return tf.gather(all_rows, pieces.values), received


class TensorFlowCommunicator(Communicator):
    """Runs collectives of a `tf.distribute.Strategy`, between its replicas.

    Args:
        strategy: The strategy.
        size: The number of ranks: replicas inside of `strategy.run`, processes outside of it.
    """

    name = "TensorFlow's collectives"

    def __init__(self, strategy: Any, size: int):
        super().__init__(size)
        self._strategy = strategy

    def _in_replica(self, function: Callable[[Any], Any]) -> Any:
        context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
        if context is not None:
            return function(context)

        @tf.autograph.experimental.do_not_convert
        def in_replica() -> Any:
            return function(tf.distribute.get_replica_context())

        return self._strategy.run(in_replica)

    def rank(self) -> tf.Tensor:
        """Returns this rank, a scalar int32 tensor."""
        return self._in_replica(lambda context: tf.cast(context.replica_id_in_sync_group, tf.int32))

    def sum(self, tensors: list[tf.Tensor], timeout_s: float | None = None) -> list[tf.Tensor]:
        """Sums tensors over the ranks, one operation for each dtype; waits `timeout_s` for its peers, if given."""
        summed = list(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):  # The same order on every rank.
            of_dtype = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            values = self._all_reduce([tensors[i] for i in of_dtype], timeout_s)
            for i, value in zip(of_dtype, values):
                summed[i] = value
        return summed

    def _all_reduce(self, tensors: list[tf.Tensor], timeout_s: float | None) -> Any:
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout_s)
        return self._in_replica(lambda context: context.all_reduce(_SUM, tensors, options))

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates along axis 0, in rank order; lengths may differ."""
        if tf.executing_eagerly() or process_count(self._strategy) != self.size:
            return super().gather(tensor)
        # The identity has a device, which the gather needs.
        return self._in_replica(lambda context: context.all_gather(tf.identity(tensor), 0))
