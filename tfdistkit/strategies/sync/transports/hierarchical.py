"""Sums large tensors within each host through its memory, and then between the hosts, over one rank of each.

Small tensors use TensorFlow's collectives between all ranks, by which TensorFlow also detects ranks that run different
steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdistkit.collectives.shm.transport import SharedMemoryTransport, as_tensorflow_error
from tfdistkit.keras_adapter import private_collectives
from tfdistkit.strategies.sync import collective_keys, peer_errors

# Sums of fewer bytes are faster over TensorFlow alone: they wait for fewer messages.
LARGE_BYTES = 1 << 16

# Tensors are fused and cut to this size, so that some are summed within the hosts while others travel between them.
BUCKET_BYTES = 16 << 20

# The groups of the first ranks of all hosts, far above the keys that strategies draw. TensorFlow takes the sums of a
# group one after the other, and a link would rest where one of them waits; so buckets take turns.
_GROUP_KEYS = range(collective_keys.BASE_OF_PROCESSES + (1 << 29), collective_keys.BASE_OF_PROCESSES + (1 << 29) + 4)

# Seconds that a rank waits for the first rank of its host beyond the timeout, whose error is more precise.
_MORE_S = 30.0


class HierarchicalSums:
    """The large sums of a job whose ranks are on several hosts.

    Args:
        within: Sums within this host; None if no other rank is on it.
        rank: This rank.
        hosts: The ranks of each host, in rank order.
        timeout_s: Seconds that a collective waits for the other ranks.

    Attributes:
        within: As above.
        hosts: The number of hosts.
        host: The number of this one.
    """

    def __init__(
        self, within: SharedMemoryTransport | None, rank: int, hosts: Sequence[Sequence[int]], timeout_s: float
    ):
        self.within, self.hosts, self._timeout_s = within, len(hosts), timeout_s
        self.host = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        self._is_first = rank in [ranks[0] for ranks in hosts]
        self._size = sum(len(ranks) for ranks in hosts)
        self._across: list[Any] = []

    def start(self, strategy: Any) -> None:
        """Joins the first ranks of the hosts.

        Args:
            strategy: The strategy, whose TensorFlow server runs.
        """
        if self._is_first:
            self._across = [private_collectives.launcher_of_group(strategy, key, self.hosts) for key in _GROUP_KEYS]
        if self.within is not None:
            self.within.engine.on_failure = _tell_other_hosts
            peer_errors.tell_host_by(self.within.engine.fail)

    def takes(self, values: Sequence[Any]) -> list[int]:
        """Returns which values are to be summed by `all_reduce`, alike on all ranks: dense floats, if they are many."""
        dense: dict[tf.DType, list[int]] = {}
        nbytes: dict[tf.DType, int] = {}
        for i, value in enumerate(values):
            if not isinstance(value, (tf.Tensor, tf.Variable)) or not value.dtype.is_floating:
                continue
            if value.shape.is_fully_defined():
                dense.setdefault(value.dtype, []).append(i)
                nbytes[value.dtype] = nbytes.get(value.dtype, 0) + value.shape.num_elements() * value.dtype.size
        return [i for dtype, of_dtype in dense.items() if nbytes[dtype] >= LARGE_BYTES for i in of_dtype]

    def all_reduce(self, values: Sequence[Any], reduce_op: tf.distribute.ReduceOp) -> list[tf.Tensor]:
        """Sums or averages dense tensors over all ranks, with the same bits on each.

        Args:
            values: Tensors of static shapes, the same on every rank.
            reduce_op: SUM or MEAN.
        """
        sums = _in_buckets(values, self._sum)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            return [total / tf.cast(self._size, total.dtype) for total in sums]
        return sums

    def sum_over_hosts(self, values: Sequence[Any]) -> list[tf.Tensor]:
        """Sums tensors over the hosts, with the same bits on each rank.

        Args:
            values: Dense tensors of static shapes, equal on the ranks of a host.
        """
        return _in_buckets(values, self._sum_of_first)

    def _sum_of_first(self, tensors: list[tf.Tensor], size: int, number: int) -> tf.Tensor:
        flat = tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)
        return self._from_first(self._sum_across(flat, number) if self._is_first else flat[:0], size)

    def _sum_across(self, flat: tf.Tensor, number: int) -> tf.Tensor:
        return self._across[number % len(self._across)].all_reduce(flat)

    def _from_first(self, flat: tf.Tensor, size: int) -> tf.Tensor:
        if self.within is not None:
            flat = self.within.broadcast_from_first(flat, size, self._timeout_s + _MORE_S)
        return tf.ensure_shape(flat, [size])

    def _sum(self, tensors: list[tf.Tensor], size: int, number: int) -> tf.Tensor:
        if self.within is None:
            return self._sum_of_first(tensors, size, number)
        flat = self.within.sum_on_first(tensors)
        return self._from_first(self._sum_across(flat, number) if self._is_first else flat, size)


def _in_buckets(values: Sequence[Any], sum_bucket: Callable[[list[tf.Tensor], int, int], tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors of static shapes by a function of some of them, which returns their sums flat, one after another.

    Args:
        values: The tensors.
        sum_bucket: Called with tensors, the number of all their elements, and the number of the bucket.
    """
    tensors = [tf.convert_to_tensor(value) for value in values]
    of_tensors = [_pieces(tensor) for tensor in tensors]
    pieces = [piece for of_tensor in of_tensors for piece in of_tensor]
    sums: list[Any] = [None] * len(pieces)
    for number, bucket in enumerate(_buckets(pieces)):
        sizes = [pieces[i].shape.num_elements() for i in bucket]
        for i, flat in zip(bucket, tf.split(sum_bucket([pieces[i] for i in bucket], sum(sizes), number), sizes)):
            sums[i] = flat
    joined = iter(sums)
    flats = [[next(joined) for _ in of_tensor] for of_tensor in of_tensors]
    return [tf.reshape(flat[0] if len(flat) == 1 else tf.concat(flat, 0), tensor.shape)
            for flat, tensor in zip(flats, tensors)]  # fmt: skip


def _pieces(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns a tensor as flat tensors that fit into a bucket."""
    flat, size, most = tf.reshape(tensor, [-1]), tensor.shape.num_elements(), BUCKET_BYTES // tensor.dtype.size
    if size <= most:
        return [flat]
    return list(tf.split(flat, [min(most, size - first) for first in range(0, size, most)]))


def _buckets(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Returns the tensors that are summed at once: those of a dtype, in order, up to some size."""
    buckets: list[list[int]] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        nbytes = BUCKET_BYTES
        for i in (i for i, tensor in enumerate(tensors) if tensor.dtype == dtype):
            own = tensors[i].shape.num_elements() * dtype.size
            if nbytes + own > BUCKET_BYTES:
                buckets.append([])
                nbytes = 0
            buckets[-1].append(i)
            nbytes += own
    return buckets


def _tell_other_hosts(error: Exception) -> None:
    """Ends the collectives of the other hosts, which wait for this one, with the error of the ranks of this host."""
    message = f"Collective ops: {as_tensorflow_error(error).message}"

    def tell() -> None:
        with contextlib.suppress(tf.errors.OpError):  # Another rank was faster.
            private_collectives.tell_other_workers(message)

    # It waits for an answer of rank 0, which may be the one that is lost.
    threading.Thread(target=tell, name="tfdistkit-tell-other-hosts", daemon=True).start()
