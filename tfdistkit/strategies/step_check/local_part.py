"""Runs what may fail in a graph in this process alone, without collectives: where it fails, no rank must begin.

A rank whose trial fails leaves the others waiting in a collective. So each rank first runs the operations that may fail
for its rows, with what they need, if that needs no other rank. Most steps have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

# Operations with a state that wait for nobody: reads of variables and tables, checks, random numbers, handles.
_READS = (
    *("ReadVariableOp", "ResourceGather", "LookupTableFind", "LookupTableSize", "VarHandleOp", "Assert", "Random"),
    *("Stateless", "MutableHashTable", "HashTable", "Placeholder", "Multinomial", "TruncatedNormal"),
)

# Operations that fail for some rows, or some numbers of them. Others are told by their attributes (`_may_fail`).
_FAIL = (
    *("TopK", "InTopK", "GatherV2", "GatherNd", "Split", "Unpack", "EnsureShape", "Assert", "CheckNumerics", "CTC"),
    *("Cholesky", "Matrix", "BatchMatrix", "SelfAdjointEig", "Qr", "Svd", "Eig", "ScatterNd", "TensorScatter"),
    *("SegmentSum", "SegmentMean", "UnsortedSegment", "Bincount", "DenseBincount", "Slice", "ParallelConcat"),
)


def local_part(wrapped: Any, arguments: int) -> Callable[..., Any] | None:
    """Returns a function that runs those operations of a graph that may fail, and need no collective; None without any.

    Args:
        wrapped: What `tf.compat.v1.wrap_function` returned; the function takes its arguments.
        arguments: Their number.
    """
    needed, waiting = set[str](), [output.op for output in wrapped.outputs]
    operations = {operation.name: operation for operation in wrapped.graph.get_operations()}
    while waiting:
        operation = waiting.pop()
        if operation.name not in needed:
            needed.add(operation.name)
            waiting += [*(one.op for one in operation.inputs), *operation.control_inputs]
    given = {tensor.op.name for tensor in wrapped.inputs[:arguments]}
    is_local: dict[str, bool] = {}
    for name, operation in operations.items():  # In the order in which they were made: inputs come first.
        before = [*(one.op.name for one in operation.inputs), *(one.name for one in operation.control_inputs)]
        is_local[name] = not _may_wait(operation) and all(is_local.get(one, False) for one in before)
        if operation.type == "Placeholder":  # Not values that are computed at each call, such as keys of collectives.
            is_local[name] = name in given or operation.outputs[0].dtype == tf.resource
    ends = [operations[name] for name in sorted(needed) if is_local.get(name) and _may_fail(operations[name])]
    if not ends:
        return None
    part: Callable[..., Any] = wrapped.prune(wrapped.inputs[:arguments], ends)
    return part


def _may_fail(operation: tf.Operation) -> bool:
    """Returns whether an operation fails for some rows, or some numbers of them."""
    if operation.type.startswith(_FAIL):
        return True
    if operation.type not in ("StridedSlice", "Reshape"):
        return False
    given = operation.inputs[0].shape
    if not given.rank or given[0] is not None:
        return False
    if operation.type == "StridedSlice":  # A row by its number.
        return bool(operation.get_attr("shrink_axis_mask") & 1)
    wanted, inner = tf.get_static_value(operation.inputs[1]), given[1:]
    if wanted is None or not inner.is_fully_defined():
        return False
    others = int(np.prod(wanted[wanted >= 0]))
    return (wanted >= 0).all() or (others > 0 and inner.num_elements() % others != 0)


def _may_wait(operation: tf.Operation) -> bool:
    """Returns whether an operation may wait for other processes: a collective, a function or a queue with a state."""
    return bool(operation.op_def.is_stateful) and not operation.type.startswith(_READS)
