"""Scales a replica's loss so that the weighted mean over the replicas is the loss of the global batch.

There are two conventions, one for each kind of step:

- In a Keras step (`fit`, `train_on_batch`, ...) a replica's loss is the loss of its own rows, as in a single process.
  Gradients are averaged over the replicas, weighted by rows. A mean over rows and a term without rows (a regularizer,
  a penalty) are exact without changes. Other losses of Keras (sums, means over masks or weights) are scaled here so
  that their weighted mean is exact.
  In a local step the loss is that of this replica's rows alone, means over masks or weights included; a sum over rows
  is scaled to as many rows as the global batch has.
- In a custom loop (`strategy.run`) gradients are summed over the replicas, as in TensorFlow: a loss is this replica's
  part of the loss of the global batch.
  https://www.tensorflow.org/tutorials/distribute/custom_training

Each function takes Keras's or TensorFlow's own function (`original`) first, and calls it unchanged outside of replicas.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers


def reduce_values(original: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
    """Divides by the count or the weights of the global batch, not by those of this replica's part."""
    step = steps.current()
    if step is None or reduction in (None, "none"):
        return original(values, sample_weight, reduction)
    if values.shape.rank == 0:
        # A loss function that returns a scalar, which Keras does not scale. It must be a mean.
        return scale_loss(None, values)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = step.sum(step.if_any_rows(tf.reduce_sum(tf.cast(sample_weight, values.dtype))))
        return _part(step, tf.math.divide_no_nan(tf.reduce_sum(values), total))
    if reduction == "sum":
        return _part_of_sum(step, tf.reduce_sum(values))
    if data_dependence.depends_on_data(values):
        # The number of values depends on content (`tf.boolean_mask`): take the mean over the values of all replicas.
        count = step.sum(step.if_any_rows(tf.cast(tf.size(values), values.dtype)))
        return _part(step, tf.math.divide_no_nan(tf.reduce_sum(values), count))
    return original(values, sample_weight, reduction)


def reduce_weighted_values(
    original: Any,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Weights a mean that a loss function took itself by the weights of all rows; Keras uses those of its own batch.

    Keras multiplies each element of the weights by that mean, so the result is the mean times the average weight.
    """
    step = steps.current()
    values = keras.ops.convert_to_tensor(values, dtype=dtype)
    is_weighted = sample_weight is not None or mask is not None
    if step is None or not is_weighted or values.shape.rank != 0:
        return original(values, sample_weight, mask, reduction, dtype)
    if reduction == "mean_with_sample_weight":
        return scale_loss(None, values)
    weight, count = _weight(sample_weight, mask, values.dtype)
    sums = step.sum(step.if_any_rows(tf.stack([tf.reduce_sum(weight), count])))
    if reduction in (None, "none"):  # One element for each weight; their sum is this replica's part.
        part = values * tf.cast(step.share(), values.dtype) * sums[0] / tf.cast(tf.size(weight), values.dtype)
        return part * tf.ones_like(weight)
    if reduction != "sum":
        return scale_loss(None, values) * tf.math.divide_no_nan(sums[0], sums[1])
    return scale_loss(None, values) * (step.sum_like_global(sums[0]) if step.is_local else sums[0])


def _weight(sample_weight: Any, mask: Any, dtype: Any) -> tuple[Any, Any]:
    """Merges weights and mask as Keras does; returns the weights and the number of valid elements."""
    if mask is None:
        weight = keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
        return weight, tf.cast(tf.size(weight), dtype)
    mask = tf.cast(mask, dtype)
    if sample_weight is None:
        return mask, tf.reduce_sum(mask)
    weight = keras.ops.convert_to_tensor(sample_weight, dtype=dtype)
    while weight.shape.rank < mask.shape.rank:
        weight = weight[..., None]
    while weight.shape.rank > mask.shape.rank:
        weight = tf.squeeze(weight, -1)
    return weight * mask, tf.reduce_sum(mask)


def apply_mask(original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    """Divides by the number of valid entries of the global batch; Keras uses that of its own batch."""
    step = steps.current()
    if step is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return original(sample_weight, mask, dtype, reduction)
    weight = original(sample_weight, mask, dtype, "sum")
    mask = tf.cast(mask, dtype)
    counts = step.sum(step.if_any_rows(tf.stack([tf.cast(tf.size(mask), dtype), tf.reduce_sum(mask)])))
    return weight * tf.math.divide_no_nan(counts[0], counts[1])


def scale_loss(original: Any, value: Any) -> Any:
    """Returns a mean over this replica's rows unchanged in a Keras step, else this replica's part of the mean."""
    step = steps.current()
    if step is None:
        return original(value)
    return value if step.in_keras_step else value * tf.cast(step.share(), value.dtype)


def unscale_loss(original: Any, value: Any) -> Any:
    """Undoes `scale_loss`, for trackers that weight by this replica's rows."""
    step = steps.current()
    if step is None:
        return original(value)
    return value if step.in_keras_step else tf.math.divide_no_nan(value, tf.cast(step.share(), value.dtype))


def compute_average_loss(
    original: Any, per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None
) -> Any:
    """Converts `tf.nn.compute_average_loss` from TensorFlow's convention to that of a Keras step, inside of one.

    In other steps, without a `global_batch_size`, TensorFlow takes the rows of this replica times the replicas: wrong
    where replicas have different numbers of rows.
    """
    step = steps.current()
    if step is None or (not step.in_keras_step and global_batch_size is not None):
        return original(per_example_loss, sample_weight, global_batch_size)
    if not step.in_keras_step:
        average = original(per_example_loss, sample_weight) * step.replicas
        return tf.math.multiply_no_nan(average, tf.cast(step.share(), average.dtype))  # NaN without rows.
    if global_batch_size is not None:
        return _noted(step, _part_of_sum(step, original(per_example_loss, sample_weight, global_batch_size)))
    return _noted(step, original(per_example_loss, sample_weight) * step.replicas)


def scale_regularization_loss(original: Any, regularization_loss: Any) -> Any:
    """Undoes the division by the replicas of `tf.nn.scale_regularization_loss` in a Keras step."""
    step = steps.current()
    scaled = original(regularization_loss)
    return scaled * step.replicas if step is not None and step.in_keras_step else scaled


def _noted(step: steps.ReplicaStep, value: Any) -> Any:
    global_numbers.note_mean(step, value)
    return value


def _part(step: steps.ReplicaStep, value: Any) -> Any:
    """Returns this replica's part of a loss of the global batch, in the convention of the current step."""
    if not step.in_keras_step:
        return value
    return tf.math.divide_no_nan(value, tf.cast(step.share(), value.dtype))


def _part_of_sum(step: steps.ReplicaStep, value: Any) -> Any:
    """As `_part`, for a sum over rows, or a part of it that the user divided by the rows of the global batch."""
    is_read = bool(step.loss_calls) and step.loss_calls[-1].is_read  # Then sums become those of the global batch.
    return step.sum_like_global(value) if step.in_keras_step and not is_read else value
