"""The collectives of reducers between processes, over TensorFlow or through shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.collectives.shm.transport import SharedMemoryTransport
from tfdistkit.communication.reducer import Wire
from tfdistkit.keras_adapter import private_collectives
from tfdistkit.strategies.sync.gradients import sparse_gradients
from tfdistkit.strategies.sync.transports.hierarchical import HierarchicalSums

# TensorFlow's collectives carry no bytes; four of them travel as an int32.
_CARRIED_BYTES = 4


class SharedMemoryWire(Wire):
    """Sends tensors through the memory of the host.

    Args:
        transport: What moves them.
    """

    def __init__(self, transport: SharedMemoryTransport):
        super().__init__(transport.size, transport.rank, sparse_gradients.sum_over_replicas)
        self._transport = transport

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(self._transport.all_gather(tensor[None]), [self.replicas, *tensor.shape])

    def exchange(self, rows: tf.Tensor) -> tf.Tensor:
        received, _ = self._transport.all_to_all(rows, tf.ones([self.replicas], tf.int64))
        return tf.ensure_shape(received, rows.shape)

    def swap(self, data: tf.Tensor, partner: tf.Tensor) -> tf.Tensor:
        received, _ = self._transport.all_to_all(data[None], tf.one_hot(partner, self.replicas, dtype=tf.int64))
        return tf.ensure_shape(received[0], data.shape)

    def background(self) -> SharedMemoryBackground:
        return SharedMemoryBackground(self._transport)


class SharedMemoryBackground:
    """Sums arrays in threads; see `Background`.

    Args:
        transport: What moves them.
    """

    def __init__(self, transport: SharedMemoryTransport):
        self._transport, self.timeout_s = transport, transport.timeout_s

    def sum(self, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return self._transport.sum_in_thread(name, arrays)

    def interrupt(self) -> None:
        self._transport.engine.close()


class RingWire(Wire):
    """Sends tensors over TensorFlow's collectives between processes that have one replica each.

    Args:
        strategy: Their strategy.
    """

    def __init__(self, strategy: Any):
        own = tf.distribute.get_replica_context().replica_id_in_sync_group
        super().__init__(strategy.num_replicas_in_sync, own, sparse_gradients.sum_over_replicas)
        self._strategy = strategy

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        carried, length = _carried(tensor[None])
        received = private_collectives.gather_equal(self._strategy, carried)
        return tf.ensure_shape(_restored(received, tensor.dtype, length), [self.replicas, *tensor.shape])

    def exchange(self, rows: tf.Tensor) -> tf.Tensor:
        carried, length = _carried(rows)
        received = private_collectives.exchange_equal(self._strategy, carried)
        return tf.ensure_shape(_restored(received, rows.dtype, length), rows.shape)

    def swap(self, data: tf.Tensor, partner: tf.Tensor) -> tf.Tensor:
        own = tf.cast(self.replica_id, tf.int32)
        carried, length = _carried(data[None])
        # Sends the number of the replica with a row: the order of members in a group of TensorFlow is unknown.
        row = tf.concat([own[None, None], tf.cast(tf.reshape(carried, [1, -1]), tf.int32)], 1)

        def from_partner() -> tf.Tensor:
            rows = private_collectives.exchange_in_pair(self._strategy, tf.repeat(row, 2, 0), own, partner)
            return tf.gather(rows, tf.cast(tf.equal(rows[1, 0], partner), tf.int32))[None]

        received = tf.cond(tf.equal(partner, own), lambda: tf.identity(row), from_partner)
        return tf.ensure_shape(_restored(received[:, 1:], data.dtype, length)[0], data.shape)


class HostsWire(RingWire):
    """Sends tensors as `RingWire` between all ranks, and also within each host and between the hosts.

    Args:
        strategy: Their strategy.
        sums: What sums within the hosts, and between them.
    """

    def __init__(self, strategy: Any, sums: HierarchicalSums):
        super().__init__(strategy)
        self._sums = sums

    def within_host(self) -> Wire:
        transport = self._sums.within
        wire = Wire(1, 0, list) if transport is None else HostWire(transport)
        wire.fusion_bytes = self.fusion_bytes
        return wire

    def across_hosts(self) -> Wire:
        return Wire(self._sums.hosts, self._sums.host, self._sums.sum_over_hosts)


class HostWire(SharedMemoryWire):
    """Sends tensors to the other ranks of a host that is one of several.

    Args:
        transport: What moves them.
    """

    def __init__(self, transport: SharedMemoryTransport):
        super().__init__(transport)
        self._sum_tensors = self._sum_within_host  # Not the sum of the strategy, which is that of all hosts.

    def _sum_within_host(self, tensors: list[Any]) -> list[Any]:
        sums = self._transport.all_reduce(tensors, tf.distribute.ReduceOp.SUM)
        # What TensorFlow's optimizer of graphs makes of norms depends on whether it knows shapes, which it does on a
        # host with one rank; others would round differently.
        return [total if isinstance(total, tf.IndexedSlices) else tf.ensure_shape(total, tensor.shape)
                for total, tensor in zip(sums, tensors)]  # fmt: skip


def _carried(rows: tf.Tensor) -> tuple[tf.Tensor, int]:
    """Returns what TensorFlow can send, and the length of a row; rows of bytes are padded to whole int32."""
    if rows.dtype != tf.uint8:
        return rows, 0
    length: int = rows.shape[1]
    padded = tf.pad(rows, [[0, 0], [0, -length % _CARRIED_BYTES]])
    return tf.bitcast(tf.reshape(padded, [rows.shape[0], -1, _CARRIED_BYTES]), tf.int32), length


def _restored(received: tf.Tensor, dtype: Any, length: int) -> tf.Tensor:
    if dtype != tf.uint8:
        return received
    return tf.reshape(tf.bitcast(received, tf.uint8), [tf.shape(received)[0], -1])[:, :length]
