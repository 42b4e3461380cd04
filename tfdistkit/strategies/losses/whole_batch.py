"""Computes losses that combine rows (Dice, contrastive losses, quotients of sums) from the rows of all replicas.

A loss of Keras's classes, or of a function in `compile(loss=fn)`, is first computed from the rows of this replica. If
the graph shows that its values combine rows (`row_mixing`), the inputs of all replicas are gathered, with gradients,
and the loss is computed from them as in one process. The first values are then unused, and TensorFlow prunes them; what
the loss writes to variables is dropped where it is computed again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.collectives.differentiable import with_gradient_times
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.losses.row_mixing import Kind, kind_of
from tfdistkit.strategies.metrics.gathered_rows import gather_placed, has_rows, places_of, sum_of_any_size
from tfdistkit.strategies.metrics.metric_updates import WholeBatch, function_adds_up
from tfdistkit.strategies.sync import loss_scaling
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers
from tfdistkit.strategies.sync.gradients.gradient_scaling import gradient_share


@dataclass
class LossCall:
    """A call of a loss in a step.

    Args:
        loss: The loss.
        inputs: Its targets and predictions, each a structure of tensors in the dtype of the loss.
        means: The results of other losses that it called: means over the rows of this replica.
        mixes_rows: Whether its values combine rows; None before they are known.
        is_whole: Whether it was computed from the rows of all replicas.
        is_read: Whether its graph is read back to the sums over rows behind it, because its inputs compare rows.
    """

    loss: Any
    inputs: tuple[Any, Any]
    means: list[tf.Tensor] = field(default_factory=list)
    mixes_rows: bool | None = None
    is_whole: bool = False
    is_read: bool = False


def call_loss(original: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Hook of `Loss.__call__`: keeps the inputs for `reduce_weighted_values`, which knows the values."""
    step = steps.current()
    if step is None or not _is_covered(step):
        return original(loss, y_true, y_pred, sample_weight)
    one = LossCall(loss, (y_true, y_pred))
    one.is_read = _has_compared_rows(step, (*one.inputs, sample_weight))
    compute = functools.partial(_computed, original, step, one, sample_weight)
    if _is_of_keras(loss):
        value = compute()
    else:  # State of the loss must be written once: from all rows, if its values combine rows.
        with step.attempting() as attempt:
            value = compute()
        if not one.is_whole and (attempt.has_writes or step.is_eager):
            value = compute()
    if tf.is_tensor(value) and value.shape.rank == 0 and not one.is_read:
        global_numbers.note_mean(step, value)
    # A loss without a reduction returns values of rows; the graph shows what its caller computes from them.
    if step.loss_calls and not one.mixes_rows and tf.is_tensor(value) and value.shape.rank == 0:
        step.loss_calls[-1].means.append(value)
    return value


def _has_compared_rows(step: steps.ReplicaStep, inputs: Any) -> bool:
    """Returns whether a step computed inputs of a loss with numbers of the batch, as with the mean of the targets.

    Then its value is no mean over the rows of this replica: it is computed again from those of all rows.
    """
    kind, stock = type(step.model), keras.Model
    if step.is_eager or (kind.train_step is stock.train_step and kind.compute_loss is stock.compute_loss):
        return False
    return any(global_numbers.are_compared(step, one) for one in tf.nest.flatten(inputs) if tf.is_symbolic_tensor(one))


def _computed(original: Any, step: steps.ReplicaStep, one: LossCall, sample_weight: Any) -> Any:
    step.loss_calls.append(one)
    try:
        return original(one.loss, *one.inputs, sample_weight)
    finally:
        step.loss_calls.pop()


def _is_of_keras(loss: Any) -> bool:
    """Returns whether a loss is one of Keras, whose values are those of rows."""
    function, axes = getattr(loss, "fn", None), private_api.axes_of(loss)
    return private_api.is_of_keras(type(loss).call) and (function is None or function_adds_up(function, axes))


def _is_covered(step: steps.ReplicaStep) -> bool:
    is_here = step.in_keras_step and not step.is_local and step.rows is not None
    return is_here and not isinstance(step, WholeBatch) and not private_api.is_stateless()


def reduce_weighted_values(
    original: Any,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Hook of Keras's function of this name: replaces values that combine rows by those of the global batch."""
    step = steps.current()
    one = step.loss_calls[-1] if step is not None and step.loss_calls else None
    if step is not None and one is not None and one.mixes_rows is None:
        one.mixes_rows = _mixes_rows(step, one, keras.ops.convert_to_tensor(values))
        if one.mixes_rows and len(step.loss_calls) == 1 and _can_gather(step, one):
            found, one.is_whole = _of_all_rows(step, one), True
            mask = _mask(step, one, values, found, mask)
            whole = keras.ops.convert_to_tensor(found, dtype=dtype)
            is_weighted = sample_weight is not None or mask is not None
            if whole.shape.rank and not is_weighted and reduction not in (None, "none"):
                with steps.running(WholeBatch(step)):
                    return loss_scaling.reduce_weighted_values(original, whole, reduction=reduction, dtype=dtype)
            values = _own_part(step, values, whole) if whole.shape.rank else whole
    return loss_scaling.reduce_weighted_values(original, values, sample_weight, mask, reduction, dtype)


def _mixes_rows(step: steps.ReplicaStep, one: LossCall, values: tf.Tensor) -> bool:
    """Returns whether the values of a loss combine rows; in eager execution, whether they may."""
    if _is_of_keras(one.loss):
        return False
    # A dimension of one cannot be told from a single row, and all replicas must decide alike.
    if tf.executing_eagerly() or (step.static_total or 2 * step.replicas) < 2 * step.replicas:
        return True
    inside = {id(outer): inner for outer, inner in getattr(values.graph, "captures", [])}
    inputs = [inside.get(id(t), t) for t in tf.nest.flatten(one.inputs) if tf.is_tensor(t)]
    inputs = [t for t in inputs if isinstance(t, tf.Tensor) and t.graph is values.graph]
    means = [t for t in one.means if t.graph is values.graph]
    return kind_of(values, inputs, means, step.held_rows) is Kind.MIXED


def _can_gather(step: steps.ReplicaStep, one: LossCall) -> bool:
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    is_branch = getattr(graph, "is_control_flow_graph", False) and graph is not step.graph
    inputs = [keras.ops.convert_to_tensor(t) for t in tf.nest.flatten(one.inputs)]
    are_dense = all(isinstance(t, tf.Tensor) and t.shape.rank != 0 for t in inputs)
    return not is_branch and are_dense and all(has_rows(step, t) for t in inputs)


def _of_all_rows(step: steps.ReplicaStep, one: LossCall) -> Any:
    """Returns the values of a loss for the rows of all replicas, on each of them."""
    inputs = [keras.ops.convert_to_tensor(t, dtype=one.loss.dtype) for t in tf.nest.flatten(one.inputs)]
    y_true, y_pred = tf.nest.pack_sequence_as(one.inputs, gather_with_gradients(step, inputs))
    with steps.running(WholeBatch(step)):
        return one.loss.call(y_true, y_pred)


def _mask(step: steps.ReplicaStep, one: LossCall, values: Any, whole: Any, mask: Any) -> Any:
    """Returns the mask of this replica's values, where the loss computed one from all rows (Circle)."""
    of_all = private_api.mask_of(whole)
    if of_all is None:
        return mask
    of_inputs, own = private_api.mask_of(one.inputs[1]), _own_part(step, values, of_all)
    return own if of_inputs is None else of_inputs & own


def _own_part(step: steps.ReplicaStep, values: Any, whole: tf.Tensor) -> tf.Tensor:
    """Returns the values of this replica's rows out of those of all rows."""
    values = keras.ops.convert_to_tensor(values)
    if values.shape[0] is not None and values.shape[0] == whole.shape[0]:
        return whole  # For example one value for each class.
    _, [before], _ = places_of(step, [values])
    held = tf.shape(values)[0]
    start = tf.maximum(tf.minimum(before, tf.shape(whole)[0] - held), 0)  # A placeholder row may be past the end.
    return tf.ensure_shape(whole[start : start + held], values.shape)


def gather_with_gradients(step: steps.ReplicaStep, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Concatenates the rows of all replicas, without placeholder rows, as one process has them.

    Args:
        step: The step of this replica.
        tensors: Floating-point tensors with rows.

    Returns:
        One tensor for each. The gradient of this replica's rows is that of the losses of all replicas.
    """
    places = places_of(step, tensors)
    share = gradient_share()
    inverse = None if share is None else tf.math.divide_no_nan(tf.constant(1.0, tf.float64), tf.cast(share, tf.float64))
    results = []
    for whole, own, count, before in zip(gather_placed(step, tensors, *places), tensors, *places[:2]):
        own = own if inverse is None else with_gradient_times(own, inverse)
        whole = _with_gradient_of(step, whole, own, count, before)
        results.append(whole if share is None else with_gradient_times(whole, share))
    step.gathered_inputs.update(one.name for one in results if tf.is_symbolic_tensor(one))
    return results


def _with_gradient_of(step: steps.ReplicaStep, whole: tf.Tensor, own: tf.Tensor, count: Any, before: Any) -> tf.Tensor:
    """Returns the rows of all replicas; lets their gradient, summed over the replicas, flow to the own rows."""

    @tf.custom_gradient
    def attached(own: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            total = _sum(step, step.if_any_rows(upstream))
            rest = [[0, tf.shape(own)[0] - count], *[[0, 0]] * (own.shape.rank - 1)]
            return tf.ensure_shape(tf.pad(total[before : before + count], rest), own.shape)

        return tf.identity(whole), gradient

    return attached(own)


def _sum(step: steps.ReplicaStep, tensor: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(tensor, [-1])
    total = step.sum_of_all(flat) if flat.shape.is_fully_defined() else sum_of_any_size(step, flat)
    return tf.reshape(total, tf.shape(tensor))
