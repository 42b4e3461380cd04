"""Runs what a graph computes in this process alone, without collectives: where that fails, no rank must begin.

A rank whose trial fails leaves the others waiting in a collective. So each first runs what needs no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# Operations with a state that wait for nobody: reads of variables and tables, checks, random numbers, handles.
_READS = (
    *("ReadVariableOp", "ResourceGather", "LookupTableFind", "LookupTableSize", "VarHandleOp", "Assert", "Random"),
    *("Stateless", "MutableHashTable", "HashTable", "Placeholder", "Multinomial", "TruncatedNormal"),
)


def local_part(wrapped: Any, arguments: int) -> Callable[..., Any] | None:
    """Returns a function that runs those operations of a graph that no collective precedes; None without any.

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
    is_local: dict[str, bool] = {}
    followed = set[str]()
    for name, operation in operations.items():  # In the order in which they were made: inputs come first.
        before = [*(one.op.name for one in operation.inputs), *(one.name for one in operation.control_inputs)]
        is_local[name] = not _may_wait(operation) and all(is_local.get(one, False) for one in before)
        if is_local[name] and name in needed:
            followed.update(before)
    ends = [operations[name] for name in needed if is_local.get(name) and name not in followed]
    ends = [operation for operation in ends if operation.type != "Placeholder" and operation.outputs]
    if not ends:
        return None
    names = sorted(operation.name for operation in ends)
    part: Callable[..., Any] = wrapped.prune(wrapped.inputs[:arguments], [operations[name] for name in names])
    return part


def _may_wait(operation: tf.Operation) -> bool:
    """Returns whether an operation may wait for other processes: a collective, a function or a queue with a state."""
    return bool(operation.op_def.is_stateful) and not operation.type.startswith(_READS)
