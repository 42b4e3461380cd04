"""Repeats an operation of a graph with other inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


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
