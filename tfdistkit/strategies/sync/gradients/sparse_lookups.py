"""Gradients of rows of a table that one process looks up once, and each replica again.

The gradient of a lookup is IndexedSlices. Replicas that look up their own tokens have other entries of the lookup of
one process, so their rows are concatenated: an index that occurs twice in one process occurs twice here. That
matters, because Adam and others square the rows of IndexedSlices without adding those of one index first.

It is another matter where each replica repeats what one process does once: positions (`Embedding()(arange(n))`), the
table of relative positions of a window, and lookups that make their indices unique (`tf.nn.embedding_lookup_sparse`,
which Keras uses for sparse inputs of `Dense`). There the rows of an index are added.
"""

from __future__ import annotations

import enum
from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync.data_dependence import Ancestry, is_from_dataset, is_unknown

_KEEPS_ENTRIES = frozenset(("Reshape", "Identity", "Cast", "ExpandDims", "Squeeze"))
_UNIQUE = frozenset(
    (
        *("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"),
        *("SparseSegmentSumGradV2", "SparseSegmentMeanGradV2", "SparseSegmentSqrtNGradV2"),
    )
)
_SIZES = frozenset(("Shape", "ShapeN", "Size", "Rank"))


class Lookup(enum.Enum):
    """What the indices of IndexedSlices are: those of rows of the batch, unique ones, or the same on all replicas."""

    OF_ROWS = "of rows"
    UNIQUE = "unique"
    SAME = "same"


def lookup_of(gradient: Any) -> Lookup:
    """Returns what the indices of a replica's gradient are, read from its graph.

    Args:
        gradient: A tensor or IndexedSlices. In eager execution, where no graph tells, the indices count as those of
            rows.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tf.executing_eagerly():
        return Lookup.OF_ROWS
    indices = gradient.indices
    if hasattr(indices, "numpy"):  # Made before the step, as a constant.
        return Lookup.SAME
    while indices.op.type in _KEEPS_ENTRIES:
        indices = indices.op.inputs[0]
    if indices.op.type in _UNIQUE:
        return Lookup.UNIQUE
    differs = Ancestry(lambda one: is_from_dataset(one) or is_unknown(one), is_end=lambda one: one.op.type in _SIZES)
    return Lookup.OF_ROWS if differs.includes(indices) else Lookup.SAME


def with_rows_added(total: Any, lookup: Lookup, replicas: int) -> Any:
    """Adds up the rows of replicas that looked up the same.

    Args:
        total: The sum over the replicas: a tensor, which stays as it is, or IndexedSlices with the rows of all
            replicas, concatenated in their order.
        lookup: What the indices of the replicas are.
        replicas: The number of replicas.

    Returns:
        The gradient of one process.
    """
    if not isinstance(total, tf.IndexedSlices) or lookup is Lookup.OF_ROWS:
        return total
    if lookup is Lookup.UNIQUE:
        values, indices = _by_index(total)
    else:
        # Each replica may look up one index several times (a window has many pairs at one distance), as one process
        # does: then entries are added by place. Where lengths differ (padding to a replica's longest row), by index.
        length = tf.size(total.indices) // replicas
        first = total.indices[:length]
        is_repeated = tf.logical_and(
            tf.equal(length * replicas, tf.size(total.indices)),
            tf.reduce_all(tf.equal(tf.tile(first, [replicas]), total.indices[: length * replicas])),
        )
        values, indices = tf.cond(is_repeated, lambda: _by_place(total, length, replicas), lambda: _by_index(total))
    values.set_shape([None, *total.values.shape[1:]])
    return tf.IndexedSlices(values, indices, total.dense_shape)


def _by_place(total: tf.IndexedSlices, length: tf.Tensor, replicas: int) -> tuple[tf.Tensor, tf.Tensor]:
    sizes = tf.concat([[replicas, length], tf.shape(total.values)[1:]], 0)
    return tf.reduce_sum(tf.reshape(total.values, sizes), 0), total.indices[:length]


def _by_index(total: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    indices, places = tf.unique(total.indices)
    return tf.math.unsorted_segment_sum(total.values, places, tf.size(indices)), indices
