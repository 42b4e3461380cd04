"""Divides gradients into buckets: the first sums travel while the backward pass still computes the other gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Bytes of a bucket. PyTorch's DistributedDataParallel has 25 MB, too.
FUSION_BYTES = 25 << 20
# Bytes of the bucket that is sent first: the sooner it is sent, the more of the backward pass is left.
FIRST_BYTES = 1 << 20


def buckets(tensors: Sequence[Any], fusion_bytes: int | None, first_bytes: int = FIRST_BYTES) -> list[list[int]]:
    """Returns which tensors are summed in one operation, alike on all replicas.

    The backward pass computes the gradients of the last layers first, so the last tensors make the first bucket.

    Args:
        tensors: Gradients in the order of the variables, dense or IndexedSlices.
        fusion_bytes: The most bytes of a bucket of several tensors; None for one bucket.
        first_bytes: The same, of the bucket that is sent first.

    Returns:
        The positions of the tensors of each bucket, in the order in which they are summed.
    """
    if fusion_bytes is None or tf.executing_eagerly() or len(tensors) < 2:
        return [list(range(len(tensors)))] if tensors else []
    result: list[list[int]] = [[]]
    held, room = 0, min(first_bytes, fusion_bytes)
    for i in reversed(range(len(tensors))):
        nbytes = _nbytes(tensors[i])
        if result[-1] and held + nbytes > room:
            result.append([])
            held, room = 0, fusion_bytes
        result[-1].insert(0, i)
        held += nbytes
    return result


def _nbytes(tensor: Any) -> int:
    """Returns the size of a dense tensor; 0 for one of unknown size, and for IndexedSlices, which are few rows."""
    if isinstance(tensor, tf.IndexedSlices):
        return 0
    size = tf.TensorShape(tensor.shape).num_elements()
    return 0 if size is None else size * tensor.dtype.size
