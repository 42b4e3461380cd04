"""Hooks of optimizers: replace gradients by those of the global batch before they are clipped or accumulated.

Each hook takes Keras's own function (`original`) first; see `keras_patches`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.collectives.differentiable import weigh_ranks_by, with_gradient_times
from tfdistkit.communication.reducer import times
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.metrics import metrics_of_step
from tfdistkit.strategies.parameter_server import profiling
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers, local_losses
from tfdistkit.strategies.sync.gradients import missing_gradients, overwritten, reducer_state, trial
from tfdistkit.strategies.sync.gradients.global_factors import with_global_factors

# Optimizers of loops of the user's own, whose weights have been compared between the ranks.
_compared: weakref.WeakSet[Any] = weakref.WeakSet()


def apply(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Sums gradients over the replicas before the optimizer processes them.

    Keras sums them last, so clipping, accumulation and the test for finiteness use the gradients of one replica:
    results differ from one process, and a NaN on only one rank hangs the job.
    """
    if metrics_of_step.is_building():
        return
    step = steps.current()
    if step is None or step.gradients_are_reduced:
        grads = list(grads)
        profiling.gradients_are_there(grads)
        return original(optimizer, grads, trainable_variables)
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    if not trial.is_tracing():
        reducer_state.require_built(optimizer, trainable_variables)
    known = trainable_variables if trainable_variables is not None else private_api.variables_of(optimizer)
    if not step.in_keras_step and optimizer not in _compared:
        _compared.add(optimizer)
        tf.distribute.get_strategy().check_weights(known)
    if tf.executing_eagerly():
        grads = missing_gradients.added(step, grads, known)
    grads = with_global_factors(step, grads)
    present = [i for i, g in enumerate(grads) if g is not None]
    new = [i for i in present if overwritten.is_overwritten(known[i])]
    for i, value in zip(new, overwritten.largest(step, [grads[i] for i in new])):
        grads[i] = value
        present.remove(i)
    variables = [known[i] for i in present]

    parts = step.without_empty(_parts_of_global_gradients(step, [grads[i] for i in present]))
    if trial.record(variables, parts):
        return
    end = step.begin_sum(parts)

    def apply_sums(summed: list[Any]) -> None:
        end(summed)
        for i, gradient in zip(present, summed):
            grads[i] = gradient
        with step.reduced_gradients():
            original(optimizer, grads, trainable_variables)

    tf.distribute.get_strategy().apply_summed(parts, variables, optimizer, apply_sums)


def apply_finite(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Tests and applies summed gradients on each replica by itself, because they are equal on all replicas.

    Where eager replicas use `merge_call`, Keras applies gradients in a second `call_for_each_replica`, whose steps do
    not know that the gradients are already summed.
    """
    step = steps.current()
    if step is None or not step.gradients_are_reduced:
        return original(optimizer, grads, trainable_variables)
    return private_api.apply_if_finite(optimizer, grads, trainable_variables)


def apply_gradients(original: Any, optimizer: Any, grads_and_vars: Any) -> Any:
    """Sums gradients before a custom `apply_gradients`, which may clip or normalise them."""
    grads_and_vars = list(grads_and_vars)
    if steps.current() is None or not grads_and_vars:
        return original(optimizer, grads_and_vars)
    grads, variables = zip(*grads_and_vars)
    apply(lambda _, grads, variables: original(optimizer, zip(grads, variables)), optimizer, grads, variables)
    return optimizer.iterations


def all_reduce_sum_gradients(original: Any, optimizer: Any, grads_and_vars: Any) -> Any:
    """Skips Keras's sum for gradients that are already summed."""
    step = steps.current()
    if step is not None and step.gradients_are_reduced:
        return list(grads_and_vars)
    return original(optimizer, grads_and_vars)


def all_reduce(original: Any, context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Excludes placeholder rows from the sums of layers (synchronized BatchNormalization).

    Args:
        original: TensorFlow's own method.
        context: The replica context.
        reduce_op: As in TensorFlow.
        value: As in TensorFlow.
        options: As in TensorFlow.

    Returns:
        The result of TensorFlow's own method.
    """
    return _noted(context, _all_reduced(original, context, reduce_op, value, options))


def all_gather(original: Any, context: Any, value: Any, axis: Any, options: Any = None) -> Any:
    """Notes that a gather is the same on all replicas; as in TensorFlow, with the placeholder rows.

    Args:
        original: TensorFlow's own method.
        context: The replica context.
        value: As in TensorFlow.
        axis: As in TensorFlow.
        options: As in TensorFlow.

    Returns:
        The result of TensorFlow's own method.
    """
    return _noted(context, original(context, value, axis, options))


def _noted(context: Any, result: Any) -> Any:
    ranks = context.num_replicas_in_sync
    tf.nest.map_structure(lambda one: steps.note_same_on_all(ranks, one), result, expand_composites=True)
    return result


def _all_reduced(original: Any, context: Any, reduce_op: Any, value: Any, options: Any) -> Any:
    step = steps.current()
    if step is None or not step.in_keras_step or step.is_summing:
        return original(context, reduce_op, value, options)
    is_sum = str(getattr(reduce_op, "name", reduce_op)).upper() == "SUM"
    if step.may_be_empty and is_sum:
        value = tf.nest.map_structure(lambda v: step.if_any_rows(tf.convert_to_tensor(v)), value)
    share = gradient_share()
    if share is None:
        return original(context, reduce_op, value, options)
    inverse = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), tf.cast(share, tf.float64))
    value = tf.nest.map_structure(lambda v: with_gradient_times(v, inverse), value)
    result = original(context, reduce_op, value, options)
    return tf.nest.map_structure(lambda v: with_gradient_times(v, share), result)


def part_of_sum(tensor: tf.Tensor) -> tf.Tensor:
    """Returns what this replica adds to a sum of the user's: zeros in place of a tensor of its placeholder row."""
    step = steps.current()
    if step is None or not step.in_keras_step or step.is_summing or not step.may_be_empty:
        return tensor
    return step.if_any_rows(tensor)


def weigh_collectives(own_rows: Callable[[tf.Tensor], tf.Tensor]) -> None:
    """Lets `tfdistkit.collectives` weigh this replica in steps.

    Args:
        own_rows: Returns what this replica adds to a gather in place of a tensor.
    """
    weigh_ranks_by(gradient_share, part_of_sum, own_rows, steps.note_same_on_all)


def gradient_share() -> Any:
    """Returns the factor by which this replica's gradients are multiplied after the tape; None for no factor.

    After a local step this is their weight in the average of the weights.
    """
    step = steps.current()
    if step is None or not step.in_keras_step or (step.in_stock_train_step and not step.is_local):
        return None
    return step.global_share()


def scale_optimizer_loss(original: Any, optimizer: Any, loss: Any) -> Any:
    """Weights the loss of Keras's own train step, which is cheaper than to weight each gradient.

    Per-row losses (`reduction=None`) are not weighted: their gradient is the sum over the rows.
    """
    step = steps.current()
    if step is None or not step.in_stock_train_step:
        return original(optimizer, loss)
    local_losses.warn(step, [loss])
    local_losses.require_whole_groups(step)
    number = global_numbers.of_global_batch(step, loss)
    if number is not None:
        return original(optimizer, _part_of(step, number))
    loss = original(optimizer, loss)
    step.loss_is_weighted = True
    of_rows = _are_of_rows(step, [loss])
    own, part = (
        (step.sum_like_global(loss), loss) if step.is_local else (loss, loss * tf.cast(step.share(), loss.dtype))
    )
    return (own if of_rows else part) if isinstance(of_rows, bool) else tf.where(of_rows, own, part)


def _part_of(step: steps.ReplicaStep, number: global_numbers.GlobalNumber) -> tf.Tensor:
    """Returns a number whose gradients add up, over the replicas, to those of a number of the global batch."""
    step.loss_is_weighted = True
    share = step.share()
    parts = [tf.reduce_sum(own * tf.stop_gradient(slope * tf.cast(share, own.dtype))) for own, slope in number.slopes()]
    part = tf.add_n([tf.cast(one, number.value.dtype) for one in parts])
    global_numbers.note_mean(step, part)
    return part


def tape_gradient(original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes gradients of weights so that their mean over the replicas, which `apply` takes, is exact.

    The mean of the gradients of means over rows is. The gradient of per-row losses is a sum over the rows, and is
    divided by this replica's weight. Gradients of sums, and of other functions of sums and means, are those of the
    number of the global batch.

    Args:
        original: TensorFlow's own method.
        tape: The tape.
        target: As in TensorFlow; if some targets have rows, and others have none, the latter are taken for means.
        sources: As in TensorFlow; if any source is not a variable, gradients are unchanged.
        args: As in TensorFlow.
        kwargs: As in TensorFlow.

    Returns:
        The gradients.
    """
    of_rows: Any = False
    step = steps.current()
    are_variables = all(isinstance(s, (tf.Variable, keras.Variable)) for s in tf.nest.flatten(sources))
    if metrics_of_step.is_building() and are_variables:
        return tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), sources)
    if step is None or not are_variables:
        return original(tape, target, sources, *args, **kwargs)
    if step.in_keras_step and not step.in_stock_train_step:
        local_losses.warn(step, tf.nest.flatten(target))
        local_losses.require_whole_groups(step)
        of_rows = _are_of_rows(step, tf.nest.flatten(target))
        target, args, kwargs = _of_global_batch(step, target, args, kwargs)
    gradients = tf.nest.map_structure(_with_static_shape, original(tape, target, sources, *args, **kwargs), sources)
    if of_rows is not False:
        inverse = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), tf.cast(step.global_share(), tf.float64))
        inverse = inverse if of_rows is True else tf.where(of_rows, inverse, 1.0)
        gradients = tf.nest.map_structure(lambda g: None if g is None else times(g, inverse), gradients)
    if not step.is_eager and not step.is_in_inner_graph():
        for gradient in tf.nest.flatten(gradients):
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            values = gradient.values if is_sparse else gradient
            step.gradients.update({values.name: is_sparse} if tf.is_symbolic_tensor(values) else {})
    return gradients


def _with_static_shape(gradient: Any, variable: Any) -> Any:
    """Gives a gradient the shape of its variable: that of a matrix that multiplies sequences has an unknown one.

    And the rows of a table, so that a dense gradient made of them has a static one.
    """
    shape = tf.TensorShape(variable.shape)
    if not shape.is_fully_defined():
        return gradient
    if tf.is_symbolic_tensor(gradient):
        gradient.set_shape(shape)
    if not isinstance(gradient, tf.IndexedSlices) or gradient.dense_shape is None:
        return gradient
    return tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(shape.as_list(), gradient.dense_shape.dtype))


def _of_global_batch(step: Any, target: Any, args: tuple, kwargs: dict) -> tuple[Any, tuple, dict]:
    """Replaces losses of which the mean of the replicas is not exact by what they were computed from.

    And numbers of the batch that the gradients of the losses are multiplied by, by those of the global batch.

    Returns:
        The target, and the other arguments of `GradientTape.gradient`, with its `output_gradients`.
    """
    targets = tf.nest.flatten(target)
    numbers = [global_numbers.of_global_batch(step, one) for one in targets]
    upstream = args[0] if args else kwargs.get("output_gradients")
    upstreams = [None] * len(targets) if upstream is None else tf.nest.flatten(upstream)
    weights = [None if one is None else global_numbers.of_global_batch(step, one, of_means=True) for one in upstreams]
    if not any(numbers) and not any(weights):
        return target, args, kwargs
    upstreams = [own if weight is None else weight.value for own, weight in zip(upstreams, weights)]
    pairs: list[tuple[Any, Any]] = []
    for one, number, own in zip(targets, numbers, upstreams):
        pairs += [(one, own)] if number is None else number.slopes(own)
    kwargs["output_gradients"] = [tf.ones_like(one) if slope is None else slope for one, slope in pairs]
    if args[1:]:
        kwargs["unconnected_gradients"] = args[1]
    return [one for one, _ in pairs], (), kwargs


def _are_of_rows(step: steps.ReplicaStep, losses: list[Any]) -> Any:
    """Returns whether all losses hold numbers for each row: a bool, or a tensor for losses of unknown rank."""
    unknown = [one for one in losses if _is_of_unknown_rank(one)]
    if not all(_is_of_rows(step, one) for one in losses if not _is_of_unknown_rank(one)):
        return False
    return tf.reduce_all([tf.rank(one) > 0 for one in unknown]) if unknown else True


def _is_of_unknown_rank(loss: Any) -> bool:
    return tf.is_tensor(loss) and loss.shape.rank is None


def _is_of_rows(step: steps.ReplicaStep, loss: Any) -> bool:
    """Returns whether a loss holds a number for each row, or token, of this replica."""
    if not tf.is_tensor(loss) or loss.shape.rank == 0:
        return False
    return loss.shape[0] in (None, step.held_rows)


def is_stock_train_step(model: Any, step_function: Any) -> bool:
    """Returns whether both the train step and the optimizer are Keras's own."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    is_train_step = getattr(step_function, "__name__", "") == "train_step" and "train_step" not in vars(model)
    keras_own = all(private_api.is_of_keras(type(o)) for o in (model.optimizer, optimizer))
    return is_train_step and type(model).train_step is keras.Model.train_step and keras_own


def _parts_of_global_gradients(step: steps.ReplicaStep, gradients: list[Any]) -> list[Any]:
    """Returns this replica's parts, whose sum over the replicas is the gradients of the global batch."""
    return step.weighted(gradients) if step.in_keras_step and not step.loss_is_weighted else gradients
