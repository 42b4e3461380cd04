"""What a loss of one replica is divided by: rows and weights of the global batch, not those of its own part.

Keras divides by what a replica holds and then by the number of replicas, a mean of means that is right only
where all replicas hold equally many rows, valid entries and weights. Each function here takes Keras's own
(`original`) first and passes through to it outside of the replicas.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.strategies import step as steps


def reduce_values(original: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
    """Divides by what the global batch holds, not by what this replica's part of it holds."""
    step = steps.current()
    if step is None or reduction in (None, "none"):
        return original(values, sample_weight, reduction)
    if values.shape.rank == 0:
        # A loss function that returns a scalar: Keras forgets to scale it. A mean is what it must be.
        return scale_loss(None, values)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = step.sum(tf.reduce_sum(tf.cast(sample_weight, values.dtype)))
        return _as_seen(step, tf.math.divide_no_nan(tf.reduce_sum(values), total) * step.replicas)
    if reduction == "sum":
        return _as_seen(step, tf.reduce_sum(values) * step.replicas)
    return original(values, sample_weight, reduction)


def apply_mask(original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    """Divides by the valid entries of the global batch, as Keras does by those of its own batch."""
    step = steps.current()
    if step is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return original(sample_weight, mask, dtype, reduction)
    weight = original(sample_weight, mask, dtype, "sum")
    mask = tf.cast(mask, dtype)
    counts = step.sum(tf.stack([tf.cast(tf.size(mask), dtype), tf.reduce_sum(mask)]))
    return weight * tf.math.divide_no_nan(counts[0], counts[1])


def scale_loss(original: Any, value: Any) -> Any:
    """Weighs a replica's mean by its rows; Keras weighs all replicas alike."""
    step = steps.current()
    if step is None:
        return original(value)
    return _as_seen(step, value * tf.cast(step.relative_share(), value.dtype))


def _as_seen(step: steps.ReplicaStep, value: Any) -> Any:
    """Returns a replica's loss such that the mean over the replicas is the loss of the global batch.

    In a Keras step user code sees that value, as in one process (Keras would show it divided by the
    replicas), and only its gradient is divided. In a loop of the user's own the value is divided too, for
    there the replicas' losses are summed: https://www.tensorflow.org/tutorials/distribute/custom_training
    """
    scale = 1.0 / step.replicas
    return _scale_gradient(value, scale) if step.in_keras_step else value * scale


def _scale_gradient(value: Any, scale: float) -> Any:
    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        return tf.identity(x), lambda upstream: upstream * scale

    return scaled(value)


def unscale_loss(original: Any, value: Any) -> Any:
    """For the tracker of the total loss, which weighs what it gets by this replica's rows."""
    step = steps.current()
    if step is None:
        return original(value)
    if not step.in_keras_step:
        value = value * step.replicas
    return tf.math.divide_no_nan(value, tf.cast(step.relative_share(), value.dtype))


class LossesOfOutputs:
    """Keras's module of losses as the trackers of single outputs see it.

    They weigh a batch by its rows only where these are known while tracing; elsewhere every batch counts 1,
    and then the plain mean over the replicas has to be right.

    Args:
        module: Keras's module of losses.
    """

    def __init__(self, module: Any):
        self._module = module

    def unscale_loss_for_distribution(self, value: Any) -> Any:
        """Returns an output's loss as its tracker has to get it."""
        step = steps.current()
        if step is not None and step.in_keras_step and step.static_rows is None:
            return value
        return self._module.unscale_loss_for_distribution(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
