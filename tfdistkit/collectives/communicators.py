"""Who carries a collective: TensorFlow, Horovod, or nobody because this process is alone.

A communicator moves tensors and knows nothing of gradients, dtypes that need a carrier, or users' mistakes:
`operations` does, once for all of them. What is here works in eager mode and in graphs, and anywhere in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.collectives.registry import process_count

_SUM = tf.distribute.ReduceOp.SUM


class Communicator:
    """Carries tensors between `size` ranks. A transport of its own says how to sum; the rest can stand on that.

    Args:
        size: How many ranks take part.
    """

    name = "nobody"

    def __init__(self, size: int = 1):
        self.size = size

    def rank(self) -> tf.Tensor:
        """Returns this rank, a scalar int32 tensor."""
        return tf.constant(0)

    def sum(self, tensors: list[tf.Tensor], timeout_s: float | None = None) -> list[tf.Tensor]:
        """Sums tensors over the ranks, those of a dtype in one go; waits `timeout_s` for them, if that is given."""
        return tensors

    def table(self, row: tf.Tensor, timeout_s: float | None = None) -> tf.Tensor:
        """Returns one row for each rank; rows have one shape."""
        place = tf.one_hot(self.rank(), self.size, dtype=row.dtype)
        return self.sum([tf.reshape(place, [self.size] + [1] * row.shape.rank) * row], timeout_s)[0]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates along axis 0, in the order of the ranks; lengths may differ.

        A sum of tensors that are zero but for one's own rows: twice the traffic of a real gather. TensorFlow's
        own traces a function for each call in eager mode (0.1 s), and cannot stand in a branch where a process
        has several replicas.
        """
        first, total = self.place_of_own(tensor)
        own = tf.shape(tensor)[0]
        around = [[first, total - first - own]] + [[0, 0]] * (tensor.shape.rank - 1)
        return self.sum([tf.pad(tensor, around)])[0]

    def place_of_own(self, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns where this rank's rows begin among the rows of all ranks, and how many those are."""
        lengths = self.table(tf.shape(tensor)[0])
        return tf.reduce_sum(lengths[: self.rank()]), tf.reduce_sum(lengths)

    def extreme(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        """Takes the smallest ("min") or the largest ("max") over the ranks."""
        table = self.gather(tensor[None])
        return tf.reduce_min(table, 0) if op == "min" else tf.reduce_max(table, 0)

    def broadcast(self, tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
        """Returns the tensor of `root_rank`."""
        return self.sum([tf.where(self.rank() == root_rank, tensor, tf.zeros_like(tensor))])[0]

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums, and returns this rank's share of the rows; the first ranks get one more if they do not divide."""
        return self.own_share(self.sum([tensor])[0])

    def own_share(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns this rank's share of the rows of a tensor that all ranks have."""
        rows = tf.shape(tensor)[0]
        least, more, rank = rows // self.size, rows % self.size, self.rank()
        first = rank * least + tf.minimum(rank, more)
        return tensor[first : first + least + tf.cast(rank < more, tf.int32)]

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows to rank r; returns what came, in the order of the ranks, and how many from each."""
        sent = self.table(splits)  # [from, to]
        everything, rank = self.gather(tensor), self.rank()
        ends = tf.reshape(tf.cumsum(tf.reshape(sent, [-1])), [self.size, self.size])
        received = sent[:, rank]
        pieces = tf.ragged.range(ends[:, rank] - received, ends[:, rank])
        return tf.gather(everything, pieces.values), received


class TensorFlowCommunicator(Communicator):
    """Over the collectives of a `tf.distribute.Strategy`, between its replicas.

    Args:
        strategy: The strategy.
        size: How many ranks take part: replicas inside of `strategy.run`, processes outside.
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
        """Sums tensors over the ranks, those of a dtype in one go; waits `timeout_s` for them, if that is given."""
        summed = list(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):  # In the same order on every rank.
            of_dtype = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            values = self._all_reduce([tensors[i] for i in of_dtype], timeout_s)
            for i, value in zip(of_dtype, values):
                summed[i] = value
        return summed

    def _all_reduce(self, tensors: list[tf.Tensor], timeout_s: float | None) -> Any:
        options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout_s)
        return self._in_replica(lambda context: context.all_reduce(_SUM, tensors, options))

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates along axis 0, in the order of the ranks; lengths may differ."""
        if tf.executing_eagerly() or process_count(self._strategy) != self.size:
            return super().gather(tensor)
        # A copy made here has a device, which the gather asks for.
        return self._in_replica(lambda context: context.all_gather(tf.identity(tensor), 0))
