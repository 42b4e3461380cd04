"""Runs the collectives of user code over Horovod, which has an operation for each.

TensorFlow treats Horovod's operations as pure functions. It prunes an operation whose result is unused, and folds an
operation on constants while it traces: on this rank, and perhaps not on its peers, which then hang. So in a graph no
input is a constant (`opaque`), and every operation runs (`kept`).
"""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import tensorflow as tf

from tfdistkit.collectives import horovod_transport as transport
from tfdistkit.collectives.communicators import Communicator
from tfdistkit.collectives.horovod_transport import hvd, next_name, opaque
from tfdistkit.errors import UnsupportedError, explain


class HorovodCommunicator(Communicator):
    """Runs collectives over Horovod, between the ranks of a process set.

    Args:
        process_set: The Horovod process set.
    """

    name = "Horovod"

    def __init__(self, process_set: Any):
        super().__init__(process_set.size())
        self._process_set = process_set

    def rank(self) -> tf.Tensor:
        """Returns this rank within the process set, a scalar int32 tensor."""
        return opaque(tf.constant(self._process_set.rank()))

    def sum(self, tensors: list[tf.Tensor], timeout_s: float | None = None) -> list[tf.Tensor]:
        """Sums tensors over the ranks, one fused operation for each dtype.

        Horovod has no timeout for one operation: with `timeout_s`, a thread waits, which is abandoned when the time
        is up.
        """
        if timeout_s is not None:
            return self._within(timeout_s, tensors)
        return [transport.kept(t) for t in transport.all_reduce(tensors, tf.distribute.ReduceOp.SUM, self._process_set)]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates along axis 0, in rank order; lengths may differ."""
        return transport.kept(transport.all_gather(tensor, 0, self._process_set))

    def extreme(self, tensor: tf.Tensor, op: str) -> tf.Tensor:
        """Returns the minimum ("min") or the maximum ("max") over the ranks."""
        chosen = hvd.Min if op == "min" else hvd.Max
        return transport.kept(hvd.allreduce(opaque(tensor), op=chosen, **self._as(f"all_reduce_{op}")))

    def broadcast(self, tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
        """Returns the tensor of `root_rank`, a rank of the process set."""
        ranks = self._process_set.ranks or range(self.size)
        return transport.kept(transport.broadcast(tensor, ranks[root_rank], self._process_set))

    def reduce_scatter(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sums, and returns this rank's share of the rows; the first ranks get one more if the division is uneven."""
        return transport.kept(hvd.reducescatter(opaque(tensor), op=hvd.Sum, **self._as("reduce_scatter")))

    def all_to_all(self, tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows to rank r; returns the received rows, in rank order, and how many came from each."""
        result, received = hvd.alltoall(opaque(tensor), opaque(splits), **self._as("all_to_all"))
        return transport.kept(result), received

    def _within(self, timeout_s: float, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if not tf.executing_eagerly():
            raise UnsupportedError(
                explain(
                    "`timeout_s` must be None inside of `tf.function`: Horovod has no timeout for a single operation.",
                    received=f"timeout_s={timeout_s!r}",
                    do='Remove it, or use tfdistkit.strategy("multiworker").',
                )
            )
        waiting: concurrent.futures.Future[list[tf.Tensor]] = concurrent.futures.Future()

        def wait() -> None:
            try:
                waiting.set_result(self.sum(tensors))
            except Exception as error:
                waiting.set_exception(error)

        # Not a pool: Python joins the threads of a pool when it exits.
        threading.Thread(target=wait, daemon=True).start()
        try:
            return waiting.result(timeout_s)
        except concurrent.futures.TimeoutError:
            message = f"Collective has timed out: {timeout_s} s in a barrier."
            raise tf.errors.DeadlineExceededError(None, None, message) from None

    def _as(self, kind: str) -> dict[str, Any]:
        name = next_name(kind, self._process_set)
        return {"name": name, "ignore_name_scope": True, "process_set": self._process_set}


def job_size() -> int:
    """Returns how many ranks the whole job has."""
    return int(hvd.size())


def add_process_set(ranks: tuple[int, ...]) -> Any:
    """Adds a Horovod process set; all ranks call it together.

    Raises:
        UnsupportedError: if Horovod was initialised without HOROVOD_DYNAMIC_PROCESS_SETS=1.
    """
    if len(ranks) == hvd.size():
        return hvd.global_process_set  # Horovod has no second set of the same ranks.
    try:
        return hvd.add_process_set(list(ranks))
    except ValueError as error:
        raise UnsupportedError(
            explain(
                "Horovod must be initialised with HOROVOD_DYNAMIC_PROCESS_SETS=1 to add a process set, and the set "
                "must be new.",
                received=f"ranks={list(ranks)}: {error}",
                do="Set HOROVOD_DYNAMIC_PROCESS_SETS=1 for all ranks, and make each process set once.",
            )
        ) from error
