"""Hooks of optimizers: gradients become those of the global batch before anything looks at them.

Each takes Keras's own function (`original`) first; see `keras_patches`.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdistkit.collectives.differentiable import with_gradient_times
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.parameter_server import profiling as coordinated_clock
from tfdistkit.strategies.sync import step as steps


def apply(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Sums gradients over the replicas before anything looks at them.

    Keras sums them last, so that clipping, accumulation and the test for finiteness see the gradients of
    one replica: results differ from one process, and a NaN on one rank alone hangs the job.
    """
    step = steps.current()
    if step is None or step.gradients_are_reduced:
        grads = list(grads)
        coordinated_clock.gradients_are_there(grads)
        return original(optimizer, grads, trainable_variables)
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    present = [i for i, g in enumerate(grads) if g is not None]

    parts = step.without_empty(_parts_of_global_gradients(step, [grads[i] for i in present]))
    end = step.begin_sum(parts)

    def apply_sums(summed: list[Any]) -> None:
        end(summed)
        for i, gradient in zip(present, summed):
            grads[i] = gradient
        with step.reduced_gradients():
            original(optimizer, grads, trainable_variables)

    tf.distribute.get_strategy().apply_summed(parts, apply_sums)


def apply_finite(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Lets each replica test and apply summed gradients by itself: they are the same on all.

    Where eager replicas meet in `merge_call`, Keras applies in a second `call_for_each_replica`, whose steps do not
    know that the gradients are summed.
    """
    step = steps.current()
    if step is None or not step.gradients_are_reduced:
        return original(optimizer, grads, trainable_variables)
    return private_api.apply_if_finite(optimizer, grads, trainable_variables)


def apply_gradients(original: Any, optimizer: Any, grads_and_vars: Any) -> Any:
    """Sums gradients before an `apply` of the user's own looks at them: it may clip or normalise."""
    grads_and_vars = list(grads_and_vars)
    if steps.current() is None or not grads_and_vars:
        return original(optimizer, grads_and_vars)
    grads, variables = zip(*grads_and_vars)
    apply(lambda _, grads, variables: original(optimizer, zip(grads, variables)), optimizer, grads, variables)
    return optimizer.iterations


def all_reduce_sum_gradients(original: Any, optimizer: Any, grads_and_vars: Any) -> Any:
    """Leaves gradients alone that were summed already, where Keras would sum them."""
    step = steps.current()
    if step is not None and step.gradients_are_reduced:
        return list(grads_and_vars)
    return original(optimizer, grads_and_vars)


def all_reduce(original: Any, context: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
    """Lets a row that stands in for none add nothing to sums of layers (synchronized BatchNormalization).

    Args:
        original: TensorFlow's own method.
        context: The replica context.
        reduce_op: As TensorFlow has it.
        value: As TensorFlow has it.
        options: As TensorFlow has it.

    Returns:
        What TensorFlow's own returns.
    """
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


def gradient_share() -> Any:
    """Returns what this replica's gradients are multiplied with after they were taken; None if nothing is done."""
    step = steps.current()
    return step.share() if step is not None and step.in_keras_step and not step.in_stock_train_step else None


def scale_optimizer_loss(original: Any, optimizer: Any, loss: Any) -> Any:
    """Weighs the loss of Keras's own train step, which costs less than to weigh each gradient.

    Losses of rows (`reduction=None`) have no weight: their gradient is the sum over the rows.
    """
    step = steps.current()
    loss = original(optimizer, loss)
    if step is None or not step.in_stock_train_step:
        return loss
    step.loss_is_weighted = True
    return loss if _is_of_rows(step, loss) else loss * tf.cast(step.share(), loss.dtype)


def tape_gradient(original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets the gradient of losses of rows, a sum over them, be one when `apply` has weighed it as that of a mean.

    Args:
        original: TensorFlow's own method.
        tape: The tape.
        target: As TensorFlow has it; where a target has no rows, all are left alone.
        sources: As TensorFlow has it; gradients of anything but variables are no updates, and left alone.
        args: As TensorFlow has it.
        kwargs: As TensorFlow has it.

    Returns:
        What TensorFlow's own returns.
    """
    gradients = original(tape, target, sources, *args, **kwargs)
    step = steps.current()
    if step is None or not step.in_keras_step or step.in_stock_train_step:
        return gradients
    are_variables = all(isinstance(s, (tf.Variable, keras.Variable)) for s in tf.nest.flatten(sources))
    if not are_variables or not all(_is_of_rows(step, t) for t in tf.nest.flatten(target)):
        return gradients
    inverse = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), tf.cast(step.share(), tf.float64))
    return tf.nest.map_structure(lambda g: None if g is None else steps.times(g, inverse), gradients)


def _is_of_rows(step: steps.ReplicaStep, loss: Any) -> bool:
    """Whether a loss holds a number for each row, or token, of this replica."""
    if not tf.is_tensor(loss) or loss.shape.rank == 0:
        return False
    return loss.shape.rank is None or loss.shape[0] in (None, step.held_rows)


def is_stock_train_step(model: Any, step_function: Any) -> bool:
    """Whether nothing of the user's own stands between the loss and the optimizer."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    is_train_step = getattr(step_function, "__name__", "") == "train_step" and "train_step" not in vars(model)
    keras_own = all(type(o).__module__.split(".")[0] == "keras" for o in (model.optimizer, optimizer))
    return is_train_step and type(model).train_step is keras.Model.train_step and keras_own


def _parts_of_global_gradients(step: steps.ReplicaStep, gradients: list[Any]) -> list[Any]:
    """What the replicas' sum makes the gradients of the global batch."""
    return step.weighted(gradients) if step.in_keras_step and not step.loss_is_weighted else gradients
