"""Synchronizes logs and the state of layers over the replicas at the end of a Keras step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.metrics.gathered_rows import gather_rows, has_rows
from tfdistkit.strategies.metrics.metric_results import merge
from tfdistkit.strategies.metrics.metric_updates import together
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers, local_losses


def agree(step: steps.ReplicaStep, logs: Any) -> Any:
    """Synchronizes logs and layer state over the replicas.

    Results of metrics are already equal. Other floats become their mean weighted by rows; counts of rows are summed;
    other integers and booleans become those of replica 0; tensors with rows become the rows of all replicas. Strings
    are unchanged.
    """
    leaves = [_of_known_rank(private_api.as_dense_tensor(v)) for v in tf.nest.flatten(logs)]
    for i, value in enumerate(leaves):
        whole = global_numbers.of_global_batch(step, value) if id(value) not in step.results else None
        if whole is not None:
            leaves[i] = whole.value
            step.results[id(whole.value)] = (whole.value, None, 0)
    own = [i for i, v in enumerate(leaves) if isinstance(v, tf.Tensor) and id(v) not in step.results]
    numeric = [i for i in own if leaves[i].dtype.is_floating or leaves[i].dtype.is_integer or leaves[i].dtype.is_bool]
    if step.in_test_step:
        local_losses.warn_of_numbers(step, [leaves[i] for i in numeric], "A number in the logs of `test_step`")
    rows = [i for i in numeric if has_rows(step, leaves[i])]
    others = [i for i in numeric if i not in rows]
    floats = [i for i in others if leaves[i].dtype.is_floating]
    for i, value in zip(floats, merge(step, [], _weighted(step, [leaves[i] for i in floats]))):
        leaves[i] = value
    rest = [i for i in others if i not in floats]
    for i, value in zip(rest, together(step, [leaves[i] for i in rest])):
        leaves[i] = value
    for i, value in zip(rows, gather_rows(step, [leaves[i] for i in rows]) if rows else []):
        leaves[i] = value
    return tf.nest.pack_sequence_as(logs, leaves)


def _of_known_rank(value: Any) -> Any:
    """Returns a number for a tensor of unknown rank, such as what `tf.py_function` returns."""
    is_unknown = isinstance(value, tf.Tensor) and value.shape.rank is None and value.dtype.is_floating
    return tf.reduce_mean(value) if is_unknown else value


def _weighted(step: steps.ReplicaStep, values: list[tf.Tensor]) -> list[tf.Tensor]:
    return step.without_empty([v * tf.cast(step.share(), v.dtype) for v in values])
