"""Writes `variable.assign(f(variable))` of a worker so that writes of other workers in the meantime count, too.

Between the read and the write of a step, other workers write the same variable. TensorFlow adds atomically on the
server, so what `f` adds to the value that was read is added there. What `f` does is read from the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_SAME = ("Identity", "StopGradient", "PreventGradient")
_SUMS, _DIFFERENCES = ("AddV2", "Add"), ("Sub",)
# Operations that are looked at behind a value, nearest first: each write of each layer does so.
_MOST = 2000
# One of the values that are there, and no sum of them.
_CHOICES = {"Maximum": tf.maximum, "Minimum": tf.minimum, "SelectV2": tf.where, "Select": tf.where}


def write(variable: tf.Variable, value: tf.Tensor, read: tf.Tensor) -> None:
    """Writes a value that a step has computed after it read the variable.

    Args:
        variable: The variable.
        value: Its new value.
        read: The value that the step has read, in the same graph or in one around it.
    """

    def is_read(tensor: tf.Tensor) -> bool:
        return _is_same(_original(tensor), _original(read))

    if not tf.is_symbolic_tensor(value) or tf.get_static_value(value) is not None:
        variable.assign_add(value - read)  # A reset: takes away what was read, and no more.
    elif not write_sum(variable, value, is_read) and not _write_choice(variable, value, is_read):
        if value.graph is read.graph and not _is_from(value, read):
            variable.assign(value)  # The last value counts: two differences would add up to the value of no worker.
        else:
            variable.assign_add(value - read)


def write_sum(variable: tf.Variable, value: tf.Tensor, is_read: Callable[[tf.Tensor], bool]) -> bool:
    """Adds or subtracts, if a value is a sum or a difference of what was read and something else.

    Args:
        variable: The variable.
        value: Its new value.
        is_read: Returns whether a tensor is the value of the variable that was read.

    Returns:
        False if nothing was written.
    """
    if not tf.is_symbolic_tensor(value):
        return False
    operation = _original(value).op
    if operation.type not in _SUMS + _DIFFERENCES:
        return False
    first, second = operation.inputs
    if is_read(first) and second.shape == variable.shape:
        (variable.assign_sub if operation.type in _DIFFERENCES else variable.assign_add)(second)
        return True
    if is_read(second) and operation.type in _SUMS and first.shape == variable.shape:
        variable.assign_add(first)
        return True
    return False


def is_read_of(variable: tf.Variable, tensor: tf.Tensor) -> bool:
    """Returns whether a tensor of the current graph is a read of a variable."""
    graph: Any = tf.compat.v1.get_default_graph()
    operation = _original(tensor).op
    return operation.type == "ReadVariableOp" and _is_same(operation.inputs[0], graph.capture(variable.handle))


def _write_choice(variable: tf.Variable, value: tf.Tensor, is_read: Callable[[tf.Tensor], bool]) -> bool:
    """Writes an extreme, or one of two values, of which one is what was read; returns False if it is something else.

    Adding a difference would make the extremes of two workers a sum, and infinity NaN. So the value is read once more.
    """
    operation = _original(value).op
    choice = _CHOICES.get(operation.type)
    if choice is None or not any(is_read(one) for one in operation.inputs):
        return False
    now = tf.convert_to_tensor(variable)
    variable.assign(choice(*[now if is_read(one) else one for one in operation.inputs]))
    return True


def _original(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.type in _SAME:
        tensor = tensor.op.inputs[0]
    return tensor


def _is_same(first: tf.Tensor, second: tf.Tensor) -> bool:
    return first.graph is second.graph and first.name == second.name


def _is_from(value: tf.Tensor, read: tf.Tensor) -> bool:
    """Returns whether a value was computed from what was read; True where too many operations are behind it."""
    found, waiting = {value.name}, [value]
    for one in waiting:  # Grows while it is read.
        if _is_same(one, read) or len(found) > _MOST:
            return True
        new = [before for before in one.op.inputs if before.name not in found and before.dtype != tf.resource]
        found.update(before.name for before in new)
        waiting += new
    return False
