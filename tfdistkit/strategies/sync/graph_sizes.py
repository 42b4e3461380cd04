"""Tells whether the size of a tensor depends on the content of the batch, or only on its number of rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Operations whose output size depends on the content of the inputs.
_SIZED_BY_DATA = frozenset(
    (
        "Where",
        "Unique",
        "UniqueV2",
        "UniqueWithCounts",
        "UniqueWithCountsV2",
        "DynamicPartition",
        "RaggedRange",
        "RaggedGather",
        "StringSplit",
        "StringSplitV2",
        "NonMaxSuppressionV3",
        "NonMaxSuppressionV4",
        "NonMaxSuppressionV5",
        "SparseFillEmptyRows",
        "Bincount",
        "DenseBincount",
        "SetSize",
    )
)


def depends_on_data(tensor: Any) -> bool:
    """Returns whether the number of rows of a tensor may depend on more than the number of rows of the batch.

    Args:
        tensor: A tensor with at least one dimension.

    Returns:
        False if the first dimension is static, or no operation behind the tensor has a size that depends on content.
        True in eager execution, where the operations behind a tensor are unknown.
    """
    if tf.executing_eagerly():
        return True
    if tensor.shape.rank is not None and tensor.shape[0] is not None:
        return False
    visited, waiting = set(), [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation.name in visited:
            continue
        visited.add(operation.name)
        if operation.type in _SIZED_BY_DATA:
            return True
        waiting.extend(one.op for one in operation.inputs)
    return False
