"""What a step does to its gradients after the tape, for the gradients and the numbers of the global batch.

Such as the number of rows that it divides by, a switch (`gradient * ops.cast(loss > 1, "float32")`), or clipping. The
gradients of the replicas add up, so each must be changed by the same numbers: by those of all rows, and not by those of
its own. Where that is not enough, as for the sign of a gradient, the gradients themselves are added up before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers
from tfdistkit.strategies.sync.aggregates.compared_rows import NOT_REPEATED
from tfdistkit.strategies.sync.aggregates.global_conditions import CHOICES
from tfdistkit.strategies.sync.aggregates.graph_copies import copied, outside_of_branches
from tfdistkit.strategies.sync.data_dependence import Ancestry

_PRODUCTS = frozenset(("Mul", "MulNoNan"))
_QUOTIENTS = frozenset(("Div", "RealDiv", "DivNoNan"))
_SELECTIONS = frozenset(("Select", "SelectV2"))
# Linear in the gradients among their inputs.
_LINEAR = frozenset(
    (
        *("AddV2", "Add", "AddN", "Sub", "Neg", "Identity", "Pack", "Unpack", "ConcatV2", "Split", "SplitV", "Slice"),
        *("StridedSlice", "Reshape", "ExpandDims", "Squeeze", "Transpose"),
        *(*_PRODUCTS, *_QUOTIENTS, *_SELECTIONS),
    )
)
# What cannot be repeated with other inputs.
_NOT_REPEATED = NOT_REPEATED - {"IdentityN", "StatelessIf"}


def with_global_factors(step: steps.ReplicaStep, gradients: list[Any]) -> list[Any]:
    """Computes what a step made of its gradients from those, and from the numbers, of the global batch.

    Args:
        step: The step of this replica.
        gradients: The gradients as the step gives them to the optimizer: tensors, IndexedSlices and None.

    Returns:
        The gradients, whose mean over the replicas, weighted by rows, is that of one process; unchanged where it is
        not known.
    """
    if not step.in_keras_step or step.loss_is_weighted or step.is_eager:
        return gradients
    if step.is_in_inner_graph():
        return _of_branch(step, gradients)
    changed = [tf.is_symbolic_tensor(one) and one.name not in step.gradients for one in gradients]
    if not any(changed):
        return gradients
    found = _Changes(step)
    return [found.of_global_batch(one) if is_changed else one for one, is_changed in zip(gradients, changed)]


def _of_branch(step: steps.ReplicaStep, gradients: list[Any]) -> list[Any]:
    """Computes before a branch that all replicas take what the branch made of its gradients: it clips them, say."""
    graph = step.graph
    if graph is None or step.own_condition is not None or step.is_local:
        return gradients
    before = [outside_of_branches(one, graph) if tf.is_symbolic_tensor(one) else None for one in gradients]
    with graph.as_default():
        known = with_global_factors(step, before)
    return [new if new is not old else own for new, old, own in zip(known, before, gradients)]


class _Unknown(Exception):
    """An operation that cannot be repeated."""


class _Changes:
    """What a step made of its gradients, by the names of the tensors.

    Args:
        step: The step of this replica.
    """

    def __init__(self, step: steps.ReplicaStep):
        self._step = step
        # Whether a tensor was computed from gradients of this replica.
        is_global = functools.partial(global_numbers.is_of_global_batch, step)
        self._comes_from_gradients = Ancestry(self._is_gradient, is_end=is_global).includes
        self._replaced: dict[str, tf.Tensor] = {}
        self._repeated: dict[str, tf.Tensor] = {}
        self._linear: dict[str, bool] = {}

    def of_global_batch(self, gradient: tf.Tensor) -> tf.Tensor:
        """Returns what the optimizer gets for a gradient."""
        try:
            if not self._comes_from_gradients(gradient):
                return gradient
            replaced = self._with_numbers(gradient)
            return replaced if self._is_linear(replaced) else self._of_sums(gradient)
        except (_Unknown, RecursionError):
            return gradient

    def _is_gradient(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is a gradient of the tape, or the dense one of its IndexedSlices."""
        if tensor.op.type == "UnsortedSegmentSum":
            tensor = tensor.op.inputs[0]
        return tensor.name in self._step.gradients

    def _number(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns a scalar of the global batch; None for other tensors, or if it is not known."""
        if tensor.shape.rank != 0 or tensor.dtype == tf.bool:
            return None
        number = global_numbers.of_global_batch(self._step, tensor, of_means=True)
        return None if number is None else number.value

    def _with_numbers(self, tensor: tf.Tensor) -> tf.Tensor:
        """Replaces the numbers with which the gradients behind a tensor were changed."""
        if tensor.name in self._replaced:
            return self._replaced[tensor.name]
        found = tensor if self._is_gradient(tensor) else self._number(tensor)
        if found is None and tensor.op.type in (CHOICES if tensor.dtype == tf.bool else _LINEAR):
            found = _with_inputs(tensor, [self._with_numbers(one) for one in tensor.op.inputs])
        self._replaced[tensor.name] = tensor if found is None else found
        return self._replaced[tensor.name]

    def _is_linear(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is linear in gradients of this replica, so that those of the replicas add up."""
        if tensor.name not in self._linear:
            self._linear[tensor.name] = self._is_sum(tensor)
        return self._linear[tensor.name]

    def _is_sum(self, tensor: tf.Tensor) -> bool:
        if self._is_gradient(tensor) or not self._comes_from_gradients(tensor):
            return True
        operation = tensor.op
        behind = [self._comes_from_gradients(one) for one in operation.inputs]
        if operation.type in _PRODUCTS and sum(behind) > 1:
            return False
        if (operation.type in _QUOTIENTS and behind[1]) or (operation.type in _SELECTIONS and behind[0]):
            return False
        is_cast = operation.type == "Cast" and tensor.dtype.is_floating
        return (is_cast or operation.type in _LINEAR) and all(self._is_linear(one) for one in operation.inputs)

    def _of_sums(self, tensor: tf.Tensor) -> tf.Tensor:
        """Repeats the operations behind a tensor with the gradients of the global batch."""
        gradients = list(self._gradients_behind(tensor))
        missing = [one for one in gradients if one.name not in self._repeated]
        parts = self._step.without_empty(self._step.weighted(missing))
        for one, total in zip(missing, self._step.sum(parts) if parts else []):
            self._repeated[one.name] = total
        return self._repeat(tensor)

    def _gradients_behind(self, tensor: tf.Tensor) -> Iterable[tf.Tensor]:
        """Returns the gradients of the tape that a tensor was computed from.

        Raises:
            _Unknown: if an operation on the way cannot be repeated.
        """
        found: dict[str, tf.Tensor] = {}
        waiting, seen = [tensor], {tensor.name}
        while waiting:
            one = waiting.pop()
            if self._is_gradient(one):
                if not (one.dtype.is_floating and one.shape.is_fully_defined()):
                    raise _Unknown
                found[one.name] = one
                continue
            if one.op.type in _NOT_REPEATED or one.op.op_def.is_stateful:
                raise _Unknown
            for before in one.op.inputs:
                if before.name not in seen and self._comes_from_gradients(before):
                    seen.add(before.name)
                    waiting.append(before)
        return [found[name] for name in sorted(found)]

    def _repeat(self, tensor: tf.Tensor) -> tf.Tensor:
        if tensor.name in self._repeated:
            return self._repeated[tensor.name]
        found: tf.Tensor | None = tensor
        if self._comes_from_gradients(tensor):
            found = _with_inputs(tensor, [self._repeat(one) for one in tensor.op.inputs])
        elif not tensor.op.op_def.is_stateful:
            found = self._number(tensor)
        self._repeated[tensor.name] = tensor if found is None else found
        return self._repeated[tensor.name]


def _with_inputs(tensor: tf.Tensor, inputs: list[tf.Tensor]) -> tf.Tensor:
    """Repeats the operation of a tensor with other inputs, if any is another."""
    others = {i: new for i, (one, new) in enumerate(zip(tensor.op.inputs, inputs)) if new is not one}
    return copied(tensor, others) if others else tensor
