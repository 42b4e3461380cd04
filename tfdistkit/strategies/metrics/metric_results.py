"""Computes `result()` of a metric in a Keras step from the rows of all replicas, as in one process.

The first result in a step sums the state of all metrics of the model over the replicas, together with the state of
layers; so a step needs one collective for any number of results.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.metrics.metric_updates import WholeBatch
from tfdistkit.strategies.parameter_server import atomic_updates
from tfdistkit.strategies.sync import step as steps


class _Merges(NamedTuple):
    """The merges of a graph.

    Args:
        variables: Those of the first replica, in the order of its merges.
        counts: How many merges each replica has traced.
    """

    variables: list[list[Any]]
    counts: collections.Counter[int]


_merges: weakref.WeakKeyDictionary[Any, _Merges] = weakref.WeakKeyDictionary()


def hooked_result(metric: Any, result: Callable[..., Any]) -> Any:
    """Hook of `result` of every class of metrics.

    Args:
        metric: The metric.
        result: Its own `result`, bound.

    Returns:
        The result, with tensors in place of variables, which a `tf.function` cannot return. In a local step that of
        this replica alone, unless the step computes something from it (`LocalLogs`).
    """
    step = steps.current()
    if step is None or not step.in_keras_step or isinstance(step, WholeBatch) or private_api.is_stateless():
        value, updates = _as_tensors(result()), atomic_updates.current()
        if updates is not None:
            updates.results.append(value)
        return value
    mapping = _merged(step, metric) if step.merges_results else []
    if not mapping:
        found = _as_tensors(result())
    else:
        with keras.StatelessScope(state_mapping=mapping):
            found = _as_tensors(result())
    for index, value in enumerate(tf.nest.flatten(found)):
        step.results.setdefault(id(value), (value, metric, index))
    return found


def forget_merged(step: steps.ReplicaStep, variable: Any) -> None:
    """Drops the merged value of a variable after this replica wrote it."""
    step.merged.pop(id(variable), None)


def settle_before_branch(step: steps.ReplicaStep | None) -> None:
    """Averages the state that a step wrote after it computed gradients: a branch may clip what it has accumulated.

    Args:
        step: The step of this replica; None for none.
    """
    if step is None or not step.in_keras_step or step.in_stock_train_step or step.in_update:
        return
    if step.gradients and step.layer_state and not (step.is_eager or step.is_local or step.is_in_inner_graph()):
        merge(step, [], [])


def merge(step: steps.ReplicaStep, variables: list[Any], others: list[tf.Tensor]) -> list[tf.Tensor]:
    """Averages the state of layers that this step wrote over the replicas, and sums the state of metrics.

    Args:
        step: The step of this replica.
        variables: Variables of additive metrics; their sums are stored in `step.merged`.
        others: Tensors to sum in the same collectives.

    Returns:
        The sums of `others`.
    """
    states: list[Any] = []
    if not step.is_local:  # There the state is averaged when the weights are.
        states, step.layer_state = step.layer_state, []
    local = [tf.convert_to_tensor(v) for v in states]
    parts = step.without_empty([v * tf.cast(step.share(), v.dtype) for v in local])
    parts += [private_api.local_part(v, step.replicas) for v in variables]
    summed = _sum_packed(step, parts + others)
    for state, value in zip(states, summed):
        state.write_local(value)
    for variable, value in zip(variables, summed[len(states) :]):
        step.merged[id(variable)] = value
    return summed[len(states) + len(variables) :]


def _merged(step: steps.ReplicaStep, metric: Any) -> list[tuple[Any, tf.Tensor]]:
    """Returns the variables of a metric that each replica keeps for itself, with their sums over the replicas."""
    own = [v for v in metric.variables if private_api.is_summed(v)]
    missing = [v for v in own if id(v) not in step.merged]
    if missing and step.is_in_inner_graph():
        sums = _sum_packed(step, [private_api.local_part(v, step.replicas) for v in own])
        return list(zip(own, sums))  # Tensors of a branch cannot be used outside of it.
    if missing:
        everything = {id(v): v for v in [*missing, *(step.model.metrics_variables if step.model is not None else [])]}
        others = [v for key, v in everything.items() if key not in step.merged and private_api.is_summed(v)]
        merge(step, _merged_by_first(step, others), [])
    return [(v, step.merged[id(v)]) for v in own]


def _merged_by_first(step: steps.ReplicaStep, variables: list[Any]) -> list[Any]:
    """Returns the variables that the first replica of this process has merged in its merge of the same number.

    A metric that is updated for the first time makes its variables while the first replica is traced, perhaps after it
    has merged those of others. The other replicas must sum as many numbers in their first merge.
    """
    if step.graph is None:
        return variables
    of_graph = _merges.setdefault(step.graph, _Merges([], collections.Counter()))
    number = of_graph.counts[step.replica_id]
    of_graph.counts[step.replica_id] += 1
    if number == len(of_graph.variables):
        of_graph.variables.append(variables)
    return of_graph.variables[number]


def _as_tensors(found: Any) -> Any:
    return tf.nest.map_structure(private_api.as_dense_tensor, found)


def _sum_packed(step: steps.ReplicaStep, parts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over the replicas, one collective for each dtype."""
    summed = list(parts)
    if not parts:
        return summed
    end = step.begin_sum(parts)
    for dtype in dict.fromkeys(p.dtype for p in parts):  # The same order on every rank.
        of_dtype = [i for i, p in enumerate(parts) if p.dtype == dtype]
        packed = step.sum_of_all(tf.concat([tf.reshape(parts[i], [-1]) for i in of_dtype], 0))
        for i, value in zip(of_dtype, tf.split(packed, [parts[i].shape.num_elements() for i in of_dtype])):
            summed[i] = tf.reshape(value, parts[i].shape)
    end(summed)
    return summed
