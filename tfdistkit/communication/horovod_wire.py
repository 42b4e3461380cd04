"""The wire of a reducer over Horovod."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.collectives import horovod_transport as transport
from tfdistkit.collectives.horovod_transport import hvd
from tfdistkit.communication.reducer import Wire, cast

# Horovod has no timeout for ranks that are alive; this is the default one of `multiworker`.
_BACKGROUND_TIMEOUT_S = 300.0


class HorovodWire(Wire):
    """Sums over the ranks of a Horovod process set, in one fused operation.

    Args:
        process_set: The process set.
    """

    def __init__(self, process_set: Any):
        self._process_set = process_set
        super().__init__(process_set.size(), process_set.rank(), self._all_reduce)

    def _all_reduce(self, tensors: list[Any]) -> list[Any]:
        return transport.all_reduce(tensors, tf.distribute.ReduceOp.SUM, self._process_set)

    def sum_as(self, tensors: list[Any], dtype: Any) -> list[Any]:
        """Sums as another dtype. Horovod has no bfloat16, so its bits are sent as uint16.

        Each rank receives one part of all ranks' tensors, sums it in float32, and sends the sum to all. That moves as
        many bytes as a ring all-reduce. The rows of IndexedSlices are gathered, not summed, so they keep their dtype.
        """
        if dtype != tf.bfloat16:
            return super().sum_as(tensors, dtype)
        dense = [i for i, t in enumerate(tensors) if not isinstance(t, tf.IndexedSlices)]
        sparse = [i for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)]
        results = dict(zip(sparse, self.sum([tensors[i] for i in sparse])))
        if dense:
            shapes = [tf.shape(tensors[i]) for i in dense]
            sizes = [tf.size(tensors[i]) for i in dense]
            flat = tf.concat([tf.reshape(tf.cast(tensors[i], tf.float32), [-1]) for i in dense], 0)
            for i, part, shape in zip(dense, tf.split(self._sum_bits(flat), sizes), shapes):
                results[i] = tf.cast(tf.reshape(part, shape), tensors[i].dtype)
        return [results[i] for i in range(len(tensors))]

    def _sum_bits(self, flat: tf.Tensor) -> tf.Tensor:
        padded = tf.pad(flat, [[0, -tf.size(flat) % self.replicas]])
        rows = tf.reshape(tf.cast(padded, tf.bfloat16), [self.replicas, -1])
        received = self.exchange(tf.bitcast(rows, tf.uint16))
        parts = tf.cast(tf.bitcast(received, tf.bfloat16), tf.float32)
        summed = tf.cast(tf.reduce_sum(parts, 0), tf.bfloat16)
        gathered = self.gather(tf.bitcast(summed, tf.uint16))
        return tf.reshape(tf.cast(tf.bitcast(gathered, tf.bfloat16), tf.float32), [-1])[: tf.size(flat)]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        gathered = transport.kept(transport.all_gather(tensor[None], 0, self._process_set))
        return tf.ensure_shape(gathered, [self.replicas, *tensor.shape])

    def exchange(self, rows: tf.Tensor) -> tf.Tensor:
        # Of a short vector a rank may have no part to sum, and so no use for what it receives.
        return tf.ensure_shape(transport.kept(transport.all_to_all(rows, self._process_set)), rows.shape)

    def swap(self, data: tf.Tensor, partner: tf.Tensor) -> tf.Tensor:
        splits = tf.one_hot(partner, self.replicas, dtype=tf.int32)
        received = transport.kept(transport.all_to_all(data[None], self._process_set, splits))
        return tf.ensure_shape(received[0], data.shape)

    def background(self) -> HorovodBackground:
        return HorovodBackground(self._process_set)

    def adasum(self, tensors: list[Any], dtype: Any = None) -> list[Any]:
        sent = [transport.opaque(t if dtype is None else cast(t, dtype)) for t in tensors]
        combined = transport.awaited(
            [hvd.allreduce(t, op=hvd.Adasum, name=transport.next_name("adasum"), ignore_name_scope=True) for t in sent]
        )
        return [cast(c, t.dtype) for c, t in zip(combined, tensors)]


class HorovodBackground:
    """Sums arrays in threads; see `Background`.

    Args:
        process_set: The process set.
    """

    def __init__(self, process_set: Any):
        self._process_set, self.timeout_s = process_set, _BACKGROUND_TIMEOUT_S

    def sum(self, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
        name = f"tfdistkit_thread_{name}"
        with tf.device("CPU:0"):
            sent = [tf.convert_to_tensor(array) for array in arrays]
            sums = transport.sum_of_one_dtype(sent, name, self._process_set)
        return [one.numpy() for one in sums]

    def interrupt(self) -> None:
        hvd.shutdown()
