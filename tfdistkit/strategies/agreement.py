"""What the replicas agree on at the end of a Keras step: logs and the state of layers, in one collective."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdistkit.strategies import step as steps

# Numbers. A confusion matrix of a thousand classes in every step would cost more than exact batch logs are worth.
_MOST_METRIC_STATE = 2**16


def agree(model: Any, step: steps.ReplicaStep, logs: Any) -> Any:
    """Makes logs and layer state the same on all replicas, with one collective for each dtype.

    Logs that are the results of the model's metrics become those of the metrics of all replicas together,
    as one process would show them; other scalars become their mean.
    """
    states = step.layer_state
    local = [tf.convert_to_tensor(v) for v in states]
    parts = step.without_empty([v * tf.cast(step.share(), v.dtype) for v in local])
    variables = _metric_variables(model, logs)
    leaves = tf.nest.flatten(logs)
    scalars = [i for i, v in enumerate(leaves) if tf.is_tensor(v) and v.shape.rank == 0 and v.dtype.is_floating]
    parts += [tf.convert_to_tensor(v.value) for v in variables] or step.without_empty(
        step.weighted([leaves[i] for i in scalars])
    )
    summed = _sum_packed(step, parts)
    for state, value in zip(states, summed):
        state.write_local(value)
    summed = summed[len(states) :]
    if variables:
        with keras.StatelessScope(state_mapping=list(zip(variables, summed))):
            return model.get_metrics_result()
    for i, value in zip(scalars, summed):
        leaves[i] = value
    return tf.nest.pack_sequence_as(logs, leaves)


def _metric_variables(model: Any, logs: Any) -> list[Any]:
    """Returns the state of the model's metrics if `logs` are their results, by the rule that `fit` has for it."""
    if not isinstance(logs, dict) or set(logs) != set(model.get_metrics_result()):
        return []
    variables = model.metrics_variables
    return variables if sum(v.shape.num_elements() for v in variables) <= _MOST_METRIC_STATE else []


def _sum_packed(step: steps.ReplicaStep, parts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over the replicas, all of a dtype in one collective."""
    summed = list(parts)
    for dtype in dict.fromkeys(p.dtype for p in parts):  # In the same order on every rank.
        of_dtype = [i for i, p in enumerate(parts) if p.dtype == dtype]
        packed = step.sum(tf.concat([tf.reshape(parts[i], [-1]) for i in of_dtype], 0))
        for i, value in zip(of_dtype, tf.split(packed, [parts[i].shape.num_elements() for i in of_dtype])):
            summed[i] = tf.reshape(value, parts[i].shape)
    return summed
