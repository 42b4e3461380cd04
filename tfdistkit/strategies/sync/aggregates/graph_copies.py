"""Repeats operations of a graph with other inputs, or in the graph around a branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

# The maximum number of operations of a branch that are repeated.
_MOST = 1000


def copied(tensor: tf.Tensor, others: Mapping[int, tf.Tensor]) -> tf.Tensor:
    """Repeats the operation of a tensor with other tensors at some of its inputs.

    Args:
        tensor: The result of an operation without state.
        others: By the place of an input, the tensor to use there, of the same dtype.

    Returns:
        Its result. A tape that is recording does not see it.
    """
    operation = tensor.op
    graph: Any = tf.compat.v1.get_default_graph()
    inputs = [others.get(i, one) for i, one in enumerate(operation.inputs)]
    attributes = {name: value for name, value in operation.node_def.attr.items() if not name.startswith("_")}
    dtypes = [output.dtype for output in operation.outputs]
    copy = graph.create_op(operation.type, inputs, dtypes, attrs=attributes)
    return copy.outputs[tensor.value_index]


def outside_of_branches(tensor: tf.Tensor, graph: tf.Graph) -> tf.Tensor | None:
    """Computes what a branch computes in a graph around it, so in every step.

    Args:
        tensor: A tensor of the branch.
        graph: The graph.

    Returns:
        The tensor there; None if it depends on more than tensors and variables of that graph: on the turns of a loop,
        random numbers, functions, or what the branch itself wrote before.
    """
    known: dict[str, tf.Tensor | None] = {}
    waiting = [tensor]
    while waiting and len(known) < _MOST:
        one = waiting[-1]
        missing = [] if _is_captured(one) else [before for before in one.op.inputs if before.name not in known]
        if missing and one.name not in known:
            waiting.extend(missing)
            continue
        waiting.pop()
        if one.name not in known:
            known[one.name] = _repeated(one, graph, known)
        if known[one.name] is None:
            return None
    return known.get(tensor.name)


def _is_captured(tensor: tf.Tensor) -> bool:
    return any(inner is tensor for _, inner in tensor.graph.captures)


def _repeated(tensor: tf.Tensor, graph: tf.Graph, known: Mapping[str, Any]) -> tf.Tensor | None:
    operation: Any = tensor.op
    outer = next((outer for outer, inner in tensor.graph.captures if inner is tensor), None)
    if outer is not None:
        if not tf.is_symbolic_tensor(outer) or outer.graph is graph:
            return outer
        return outside_of_branches(outer, graph)
    is_read = operation.type == "ReadVariableOp" and _has_one_value(operation.inputs[0], graph)
    calls_functions = any(value.HasField("func") for value in operation.node_def.attr.values())
    if calls_functions or operation.type == "Placeholder" or (operation.op_def.is_stateful and not is_read):
        return None
    inputs = [known[before.name] for before in operation.inputs]
    # Outside of the scopes of layers, whose comparisons of rows are taken for those of a normalization.
    with graph.as_default(), tf.name_scope("outside_of_branches/"):
        return copied(tensor, dict(enumerate(inputs)))


def _has_one_value(variable: tf.Tensor, graph: tf.Graph) -> bool:
    """Returns whether a variable has the value that it had before the branch: nothing in the branch wrote to it."""
    while variable.graph is not graph:
        branch: Any = variable.graph
        captures = {inner.name: outer for outer, inner in branch.captures}
        for operation in branch.get_operations():
            is_argument = operation.type == "Placeholder" and operation.outputs[0].name not in captures
            writes = operation.type.startswith("Assign") and operation.inputs[0].name == variable.name
            if is_argument or writes:  # A graph with arguments may be the body of a loop, which writes later.
                return False
        if variable.name not in captures or not tf.is_symbolic_tensor(captures[variable.name]):
            return variable.name in captures
        variable = captures[variable.name]
    return True
