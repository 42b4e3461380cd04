"""What a step does to its gradients after the tape, for the gradients and the numbers of the global batch.

Such as the number of rows that it divides by, a switch (`gradient * ops.cast(loss > 1, "float32")`), or clipping. The
gradients of the replicas add up, so each must be changed by the same numbers: by those of all rows, and not by those of
its own. Where that is not enough, as for the sign of a gradient, the gradients themselves are added up before.
"""

from __future__ import annotations

import warnings
from typing import Any

import tensorflow as tf

from tfdistkit.errors import explain
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers
from tfdistkit.strategies.sync.aggregates.compared_rows import NOT_REPEATED
from tfdistkit.strategies.sync.aggregates.global_conditions import CHOICES
from tfdistkit.strategies.sync.aggregates.graph_copies import copied, outside_of_branches
from tfdistkit.strategies.sync.data_dependence import Ancestry
from tfdistkit.strategies.sync.gradients import trial
from tfdistkit.strategies.sync.gradients.sparse_gradients import sum_over_replicas

_PRODUCTS = frozenset(("Mul", "MulNoNan"))
_QUOTIENTS = frozenset(("Div", "RealDiv", "DivNoNan"))
_SELECTIONS = frozenset(("Select", "SelectV2"))
_ADDITIVE = frozenset(("AddV2", "Add", "AddN", "Sub", "Pack", "ConcatV2"))
# Linear in the gradients among their inputs.
_LINEAR = frozenset(
    (
        *("Neg", "Identity", "StopGradient", "UnsortedSegmentSum", "CheckNumerics", "CheckNumericsV2"),
        *("Unpack", "Split", "SplitV", "Slice", "StridedSlice", "Reshape", "ExpandDims", "Squeeze", "Transpose"),
        *(*_ADDITIVE, *_PRODUCTS, *_QUOTIENTS, *_SELECTIONS),
    )
)
# What clips gradients, and operations that are looked at to find it.
_CLIPPING = frozenset(("Maximum", "Minimum", "ClipByValue", "Sign", "L2Loss", "Sqrt", "Rsqrt"))
_MOST_BEHIND = 300
# What cannot be repeated with other inputs.
_NOT_REPEATED = NOT_REPEATED - {"IdentityN", "StatelessIf"}


def with_global_factors(step: steps.ReplicaStep, gradients: list[Any]) -> list[Any]:
    """Computes what a step made of its gradients from those, and from the numbers, of the global batch.

    Args:
        step: The step of this replica, of Keras or in a loop of the user's own.
        gradients: The gradients as the step gives them to the optimizer: tensors, IndexedSlices and None.

    Returns:
        The gradients, whose mean over the replicas, weighted by rows, is that of one process, or whose sum is in a loop
        of the user's own; unchanged where it is not known.
    """
    if step.loss_is_weighted or step.is_eager:
        return gradients
    if step.is_in_inner_graph() and step.in_keras_step:
        return _of_branch(step, gradients)
    new = {i: one for i, one in enumerate(gradients) if _is_changed(step, one)}
    if not step.is_in_inner_graph():
        changes = _Changes(step)
        new = {i: changes.of_global_batch(one) for i, one in new.items()}
    if not step.in_keras_step:
        _warn_of_loop(step, [one for i, one in new.items() if one is gradients[i]])
    return [new.get(i, one) for i, one in enumerate(gradients)]


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _is_changed(step: steps.ReplicaStep, gradient: Any) -> bool:
    values = _values(gradient)
    return tf.is_symbolic_tensor(values) and values.name not in step.gradients


def _of_branch(step: steps.ReplicaStep, gradients: list[Any]) -> list[Any]:
    """Computes before a branch that all replicas take what the branch made of its gradients: it clips them, say."""
    graph = step.graph
    if graph is None or step.own_condition is not None or step.is_local:
        return gradients
    before = [_before_branches(one, graph) for one in gradients]
    with graph.as_default():
        known = with_global_factors(step, before)
    return [new if new is not old else own for new, old, own in zip(known, before, gradients)]


def _before_branches(gradient: Any, graph: tf.Graph) -> Any:
    values = _values(gradient)
    if not tf.is_symbolic_tensor(values):
        return None
    if values.graph is graph:
        return gradient  # Changed before the branch that applies it.
    return outside_of_branches(values, graph) if values is gradient else None


class _Unknown(Exception):
    """An operation that cannot be repeated; its type."""


def _warn_not_read(step: steps.ReplicaStep, operation: str) -> None:
    if trial.is_tracing():
        return
    take = "Take `gradients = tfdistkit.global_gradients(gradients)` first."
    if not step.in_keras_step:
        take = (
            'Sum them first: gradients = tf.distribute.get_replica_context().all_reduce("SUM", gradients). After your '
            "change divide them by strategy.num_replicas_in_sync: `apply` sums once more."
        )
    warnings.warn(
        explain(
            "What a step makes of its gradients (clipping, say) should be computed from those of the global batch. "
            "Here each replica changes its own.",
            received=f"an operation that is not repeated with other gradients: {operation or 'too many operations'}",
            do=f"{take} Then the results are those of one process.",
        ),
        stacklevel=2,
    )


def _warn_of_loop(step: steps.ReplicaStep, gradients: list[Any]) -> None:
    """Warns in a loop of the user's own if gradients that did not come from its tape, in its graph, seem clipped."""
    is_summed = Ancestry(lambda tensor: tensor.name in step.same_on_all).includes
    for gradient in gradients:
        values = _values(gradient)
        clipping = _clipping_behind(values) if tf.is_symbolic_tensor(values) else None
        if clipping is not None and not is_summed(values):
            return _warn_not_read(step, clipping)


def _clipping_behind(tensor: tf.Tensor) -> str | None:
    """Returns the type of an operation that clips among those that a gradient went through; None for none."""
    waiting, seen = [tensor], {tensor.name}
    while waiting and len(seen) < _MOST_BEHIND:
        operation = waiting.pop().op
        if operation.type in _CLIPPING:
            return str(operation.type)
        more = [one for one in operation.inputs if operation.type in _LINEAR and one.name not in seen]
        seen.update(one.name for one in more)
        waiting += more
    return None


class _Changes:
    """What a step made of its gradients, by the names of the tensors.

    Args:
        step: The step of this replica.
    """

    def __init__(self, step: steps.ReplicaStep):
        self._step = step
        # Whether a tensor was computed from gradients of this replica.
        self._comes_from_gradients = Ancestry(self._is_gradient, is_end=self._is_same_on_all).includes
        self._replaced: dict[str, tf.Tensor] = {}
        self._repeated: dict[str, tf.Tensor] = {}
        self._linear: dict[str, bool] = {}
        # Names of numbers that were computed from gradients of the global batch.
        self._numbers: set[str] = set()
        self._comes_from_numbers = Ancestry(lambda tensor: tensor.name in self._numbers).includes

    def of_global_batch(self, gradient: Any) -> Any:
        """Returns what the optimizer gets for a gradient."""
        values = _values(gradient)
        try:
            if not self._comes_from_gradients(values):
                return gradient
            replaced = self._with_numbers(values)
            if not (self._comes_from_gradients(replaced) and self._is_linear(replaced)):
                replaced = self._own_part(gradient)
        except (_Unknown, RecursionError) as error:
            _warn_not_read(self._step, str(error))
            return gradient
        return replaced if values is gradient else tf.IndexedSlices(replaced, gradient.indices, gradient.dense_shape)

    def _is_same_on_all(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self._step.same_on_all or global_numbers.is_of_global_batch(self._step, tensor)

    def _is_gradient(self, tensor: tf.Tensor) -> bool:
        return tensor.name in self._step.gradients

    def _number(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns a scalar of the global batch; None for other tensors, or if it is not known."""
        if tensor.shape.rank != 0 or tensor.dtype == tf.bool or not self._step.in_keras_step:
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
        found = tensor if found is None else found
        if tensor.shape.num_elements() == 1 and not self._is_linear(found):
            found = self._of_all(tensor)  # A norm, say.
            self._numbers.add(found.name)
        self._replaced[tensor.name] = found
        return found

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
        if operation.type in _ADDITIVE and not self._step.in_keras_step:
            # In a loop gradients are added, and what is added to them on each replica counts as often.
            if any(self._comes_from_numbers(one) and not of for one, of in zip(operation.inputs, behind)):
                return False
        is_cast = operation.type == "Cast" and tensor.dtype.is_floating
        return (is_cast or operation.type in _LINEAR) and all(self._is_linear(one) for one in operation.inputs)

    def _own_part(self, gradient: Any) -> tf.Tensor:
        """Returns this replica's part of what the step made of gradients in a way that does not add up."""
        values, step = _values(gradient), self._step
        whole = self._of_all(values)
        if values is gradient:
            return whole if step.in_keras_step else whole / step.replicas
        rows = tf.size(gradient.indices)
        own = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        [owners] = self._summed([_as_rows(tf.fill([rows, 1], own))])
        part = tf.boolean_mask(whole, tf.equal(_values(owners)[:, 0], own))[:rows]
        # The optimizer takes the mean of the replicas, weighted by rows.
        return step.sum_like_global(part) if step.in_keras_step else part

    def _of_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Repeats the operations behind a tensor with the gradients of the global batch.

        Raises:
            _Unknown: if that is not possible.
        """
        missing = {name: one for name, one in self._sums_behind(tensor).items() if name not in self._repeated}
        parts = list(missing.values())
        parts = self._step.weighted(parts) if self._step.in_keras_step else parts
        parts = [_as_rows(one) if self._are_rows(old) else one for old, one in zip(missing.values(), parts)]
        for name, total in zip(missing, self._summed(self._step.without_empty(parts))):
            self._repeated[name] = _values(total)
        return self._repeat(tensor)

    def _summed(self, parts: list[Any]) -> list[Any]:
        """Sums tensors over the replicas; rows (IndexedSlices) are gathered."""
        if self._step.is_local or not parts:
            return parts
        with self._step.summing():
            sums = sum_over_replicas(parts)
        for one in sums:
            steps.note_same_on_all(self._step.replicas, _values(one))
        return sums

    def _are_rows(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor that is linear in gradients holds rows of IndexedSlices, or what became of them."""
        if tensor.name in self._step.gradients:
            return self._step.gradients[tensor.name]
        if tensor.op.type == "UnsortedSegmentSum":
            return False
        return any(self._are_rows(one) for one in tensor.op.inputs if self._comes_from_gradients(one))

    def _sums_behind(self, tensor: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns what a tensor was computed from that adds up over the replicas: gradients, and sums of them.

        Returns:
            By the name of a tensor, the tensor to sum in its place, in the order of the graph: names differ between the
            replicas of a process.

        Raises:
            _Unknown: if an operation on the way cannot be repeated.
        """
        found: dict[str, tf.Tensor] = {}
        waiting, seen = [tensor], {tensor.name}
        while waiting:
            one = waiting.pop()
            if one.name in self._repeated:
                continue
            # Numbers are left for one sum of all gradients behind them.
            replaced = one if one is tensor or one.shape.num_elements() == 1 else self._with_numbers(one)
            if one is not tensor and self._comes_from_gradients(replaced) and self._is_linear(replaced):
                if not one.dtype.is_floating or not (one.shape.is_fully_defined() or self._are_rows(replaced)):
                    raise _Unknown(one.op.type)
                found[one.name] = replaced
                continue
            if one.op.type in _NOT_REPEATED or one.op.op_def.is_stateful:
                raise _Unknown(one.op.type)
            for before in one.op.inputs:
                if before.name not in seen and self._comes_from_gradients(before):
                    seen.add(before.name)
                    waiting.append(before)
        return found

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


def _as_rows(gradient: Any) -> tf.IndexedSlices:
    """Returns rows as IndexedSlices, whose sum over the replicas has the rows of all."""
    values = _values(gradient)
    indices = tf.zeros(tf.shape(values)[:1], tf.int32)
    return tf.IndexedSlices(values, indices, tf.constant([1, *values.shape[1:]], tf.int32))


def _with_inputs(tensor: tf.Tensor, inputs: list[tf.Tensor]) -> tf.Tensor:
    """Repeats the operation of a tensor with other inputs, if any is another."""
    others = {i: new for i, (one, new) in enumerate(zip(tensor.op.inputs, inputs)) if new is not one}
    return copied(tensor, others) if others else tensor
