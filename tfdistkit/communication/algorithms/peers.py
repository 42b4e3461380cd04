"""Pairs replicas in each round, and exchanges weights between the two replicas of a pair."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.compression.compression import Compression, flatten, unflatten
from tfdistkit.communication.compression.scatter_gather import Quantizer
from tfdistkit.communication.reducer import Reducer, Wire
from tfdistkit.communication.sums import BF16, FP16

_CASTS: dict[Any, tf.DType] = {FP16: tf.float16, BF16: tf.bfloat16}


def partner_of(turn: Any, own: Any, replicas: int) -> tf.Tensor:
    """Returns the partner of a replica in a round, as in a round-robin tournament.

    Args:
        turn: The number of the round, a scalar integer tensor, the same on all replicas.
        own: The number of this replica, a scalar integer tensor.
        replicas: The number of replicas; of an odd number, one is its own partner.

    Returns:
        A scalar int32 tensor.
    """
    odd = replicas - 1 + replicas % 2
    turn = tf.cast(tf.math.floormod(tf.cast(turn, tf.int64), odd), tf.int32)
    own = tf.cast(own, tf.int32)
    partner = tf.math.floormod(turn - own, odd)
    if replicas % 2:
        return partner
    # The replica that would be its own partner is paired with the last one, which is outside of the circle.
    alone = tf.math.floormod(turn * ((odd + 1) // 2), odd)
    return tf.where(own == odd, alone, tf.where(partner == own, odd, partner))


def can_travel(compression: Reducer) -> bool:
    """Returns whether a compression can encode one replica's numbers alone, without state."""
    return type(compression) in _CASTS or (hasattr(compression, "pack") and not compression.has_state)


class Parcel:
    """Packs tensors for another replica, some of them compressed, together with a number.

    Args:
        like: Tensors of the dtypes and static shapes of those to send.
        compression: Compresses the tensors that it supports. None: no compression.
    """

    def __init__(self, like: list[Any], compression: Reducer | None):
        self._compression = compression
        self._like = like
        takes = [self._takes(one) for one in like]
        self._small = [i for i, taken in enumerate(takes) if taken]
        self._whole = [i for i, taken in enumerate(takes) if not taken]

    def _takes(self, tensor: Any) -> bool:
        if isinstance(self._compression, Compression):
            return self._compression.takes(tensor)
        return self._compression is not None

    def pack(self, tensors: list[tf.Tensor], number: tf.Tensor) -> tf.Tensor:
        """Returns the bytes of tensors and of a scalar float32 tensor."""
        parts = [_bytes(tensors[i]) for i in self._whole]
        if self._small:
            parts.append(self._packed(flatten([tensors[i] for i in self._small])))
        return tf.concat([*parts, _bytes(number)], 0)

    def unpack(self, data: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Returns the arguments of `pack`, up to the error of the compression."""
        tensors: list[Any] = [None] * len(self._like)
        at = 0
        for i in self._whole:
            dtype = tf.as_dtype(self._like[i].dtype)
            shape = tf.TensorShape(self._like[i].shape)
            size = shape.num_elements() * dtype.size
            tensors[i] = tf.bitcast(tf.reshape(data[at : at + size], [*shape, dtype.size]), dtype)
            at += size
        small = [self._like[i] for i in self._small]
        if small:
            for i, tensor in zip(self._small, unflatten(self._unpacked(data[at:-4], small), small)):
                tensors[i] = tensor
        return tensors, tf.bitcast(data[-4:], tf.float32)

    def _packed(self, flat: tf.Tensor) -> tf.Tensor:
        dtype = _CASTS.get(type(self._compression))
        if dtype is not None:
            return _bytes(tf.cast(flat, dtype))
        quantizer: Any = self._compression
        size = int(flat.shape[0])
        blocks = _blocks(size, quantizer)
        table = tf.reshape(tf.pad(flat, [[0, blocks * quantizer.block - size]]), [1, blocks, quantizer.block])
        counts = tf.clip_by_value(size - tf.range(blocks) * quantizer.block, 0, quantizer.block)
        return quantizer.pack(table, tf.cast(counts, tf.float32)[None])[0]

    def _unpacked(self, data: tf.Tensor, like: list[Any]) -> tf.Tensor:
        dtype = _CASTS.get(type(self._compression))
        if dtype is not None:
            return tf.cast(tf.bitcast(tf.reshape(data, [-1, dtype.size]), dtype), tf.float32)
        quantizer: Any = self._compression
        size = sum(tf.TensorShape(one.shape).num_elements() for one in like)
        return tf.reshape(quantizer.unpack(data[None], _blocks(size, quantizer)), [-1])[:size]


def _blocks(size: int, quantizer: Quantizer) -> int:
    return -(-size // quantizer.block)


def _bytes(tensor: Any) -> tf.Tensor:
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def average_pair(
    values: list[tf.Tensor], anchors: list[tf.Tensor], rows: tf.Tensor, partner: tf.Tensor, parcel: Parcel, wire: Wire
) -> list[tf.Tensor]:
    """Averages weights with those of another replica, weighted by rows.

    The sum of weights times rows over both is unchanged, so over many rounds each replica counts by its rows.

    Args:
        values: The weights of this replica.
        anchors: Values that are equal on all replicas; the differences from them are sent. Empty: the weights are sent.
        rows: The rows of this replica since all replicas were equal, a scalar float32 tensor.
        partner: The number of the other replica.
        parcel: Packs the weights.
        wire: The collectives.
    """
    sent = [value - anchor for value, anchor in zip(values, anchors)] if anchors else values
    own = parcel.pack(sent, rows)
    others, other_rows = parcel.unpack(wire.swap(own, partner))
    is_first = tf.cast(wire.replica_id, tf.int32) < partner
    is_alone = tf.equal(tf.cast(wire.replica_id, tf.int32), partner) | tf.equal(rows + other_rows, 0)
    if anchors:
        # Subtracts the values as the partner decodes them, so that rounding does not change the sum of the weights.
        seen, _ = parcel.unpack(own)
        share = tf.math.divide_no_nan(other_rows, rows + other_rows)
        new = [v + tf.cast(share, v.dtype) * (other - mine) for v, other, mine in zip(values, others, seen)]
    else:
        # The same bits at both ends: the replica with the lower number first.
        share = tf.math.divide_no_nan(tf.where(is_first, other_rows, rows), rows + other_rows)
        new = [_mean(tf.where(is_first, v, other), tf.where(is_first, other, v), share)
               for v, other in zip(values, others)]  # fmt: skip
    return [tf.where(is_alone, value, average) for value, average in zip(values, new)]


def _mean(first: tf.Tensor, second: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
    # A narrow float in float32: in bfloat16 the two shares would not add up to 1.
    wide = tf.float32 if first.dtype.size < 4 else first.dtype
    of_second = tf.cast(share, wide)
    return tf.cast(tf.cast(first, wide) * (1 - of_second) + tf.cast(second, wide) * of_second, first.dtype)
