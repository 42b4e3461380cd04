"""Updates metrics in a step of several replicas, so that their state equals that of one process.

Metrics of Keras are additive: their state is sums over rows, each replica adds its own rows, and a read returns the sum
over the replicas. Any other metric may not be additive: on every replica it is updated with the rows of all replicas,
in the order of one process. Its state is then the same on all of them, and a read needs no communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.metrics import output_losses
from tfdistkit.strategies.metrics.gathered_rows import gather_rows, gather_values, has_rows
from tfdistkit.strategies.parameter_server import replayed_updates
from tfdistkit.strategies.parameter_server.replayed_updates import known_value, tensors_of, with_tensors
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import global_numbers, local_losses
from tfdistkit.strategies.sync.aggregates.global_conditions import in_graph_of_step
from tfdistkit.strategies.sync.aggregates.row_reader import can_read, reader_of
from tfdistkit.strategies.sync.data_dependence import comes_from_batch

# Functions of Keras that combine the rows of a batch with each other.
_MIXING_ROWS = ("circle", "dice", "tversky")

_Metric = TypeVar("_Metric")


def additive_metric(metric: _Metric) -> _Metric:
    """Declares that a metric is additive over rows, so that no rows are gathered for it.

    By default, a custom metric is updated with the rows of all replicas, which is exact for every metric and costs two
    collectives in each step. Declare it where predictions are large (images) and the metric only sums over rows.

    Args:
        metric: A subclass of `keras.metrics.Metric` whose `update_state` only adds sums over rows to its variables, or
            a function for `compile(metrics=[...])` that returns one value for each row, or their mean.

    Returns:
        The metric.

    Example:
        ```python
        @tfdistkit.additive_metric
        class TruePositives(keras.metrics.Metric):
            def update_state(self, y_true, y_pred, sample_weight=None):
                self.count.assign_add(ops.sum(y_true * ops.round(y_pred)))
        ```
    """
    metric.tfdistkit_adds_up = True  # type: ignore[attr-defined]
    return metric


class WholeBatch(steps.ReplicaStep):
    """The step of a metric, or a loss, that is computed from the rows of all replicas: as in one process."""

    def __init__(self, step: steps.ReplicaStep):
        super().__init__(step.rows, lambda _: step.total_rows, step.replicas, 0)
        self.in_keras_step = self.sees_all_rows = True

    @property
    def may_be_empty(self) -> bool:
        """Returns False: the global batch has rows, even if this replica has none."""
        return False

    def global_share(self) -> float:
        """Returns 1: the rows are those of the global batch."""
        return 1.0

    def sum_of_all(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value: it is already that of all replicas."""
        return value


def adds_up(metric: Any) -> bool:
    """Returns whether the state of a metric is sums over rows, which each replica may keep for itself."""
    own = type(metric)
    if getattr(own, "tfdistkit_adds_up", False):
        return True
    function = private_api.function_of(metric)
    return adds_up_by_class(own) and (function is None or function_adds_up(function, private_api.axes_of(metric)))


def adds_up_by_class(own: type) -> bool:
    """Returns whether the metrics of a class are additive, unless they apply a function that is not."""
    if getattr(own, "tfdistkit_adds_up", False):
        return True
    updating = next(c for c in own.__mro__ if "update_state" in c.__dict__)
    return private_api.is_of_keras(updating)


def function_adds_up(function: Any, axes: Any = -1) -> bool:
    """Returns whether a function of targets and predictions returns a number for each row, or their mean.

    Args:
        function: The function.
        axes: What it gets as `axis`: an int, several, or None for all.
    """
    if getattr(function, "tfdistkit_adds_up", False):
        return True
    while isinstance(function, functools.partial):
        function, axes = function.func, function.keywords.get("axis", axes)
    # A negative axis before the last one may be that of the rows.
    if isinstance(function, keras.losses.Loss) or any(one in (None, 0) or one < -1 for one in np.ravel(axes)):
        return False
    name = getattr(function, "__name__", "")
    return private_api.is_of_keras(function) and name not in _MIXING_ROWS


def hooked_update(metric: Any, update: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Hook of `update_state` of every class of metrics: Keras's own and the user's.

    Args:
        metric: The metric.
        update: Its own `update_state`, bound.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    step = steps.current()
    if private_api.is_stateless() or private_api.is_container_of_metrics(metric):
        return update(*args, **kwargs)
    if step is not None and step.drops_write():
        return None
    if isinstance(step, WholeBatch):
        return _replicated(metric, functools.partial(update, *args, **kwargs))
    kwargs = output_losses.weighted(metric, kwargs)
    if step is None:
        records = replayed_updates.current()
        if records is None or adds_up_by_class(type(metric)):
            return update(*args, **kwargs)
        return records.add(metric, args, kwargs)
    if not step.in_keras_step and _has_other_processes():  # Those of a Keras model have been checked.
        require_scope(metric)
    if not private_api.is_replicated(metric) and adds_up(metric):
        if step.in_keras_step and isinstance(metric, (keras.metrics.Mean, keras.metrics.Sum)):
            args, kwargs = _weighted(step, metric, update, args, kwargs)
        return update(*args, **kwargs)
    args, kwargs = _of_all_replicas(step, (args, kwargs))
    with steps.running(WholeBatch(step)):
        return _replicated(metric, functools.partial(update, *args, **kwargs))


def require_scope(metric: Any) -> None:
    """Checks that each replica has the state of a metric.

    Raises:
        UnsupportedError: if it was made outside of the scope: it would count the rows of one replica only.
    """
    for variable in metric.variables:
        if not isinstance(private_api.raw_variable(variable), tf.distribute.DistributedValues):
            raise UnsupportedError(
                explain(
                    "A metric must be made within `strategy.scope()`.",
                    received=f"the variable {variable.path!r} of {metric!r}, made outside of it",
                    expected="`with strategy.scope():` around the line that makes the metric",
                    do="Move `metrics = [...]`, or the metric of a loop of your own, into the scope, beside the model.",
                )
            )


def _has_other_processes() -> bool:
    strategy = tf.distribute.get_strategy()
    return strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)


def _replicated(metric: Any, update: Callable[[], Any]) -> Any:
    """Updates a metric with the rows of all replicas; also one that a loss updates which is computed from them."""
    private_api.replicate(metric)
    result = update()
    private_api.replicate(metric)  # Variables that the first update made.
    return result


def _weighted(
    step: steps.ReplicaStep, metric: Any, update: Callable[..., Any], args: tuple, kwargs: dict
) -> tuple[tuple, dict]:
    """Weights numbers without rows that update a `Mean` or a `Sum` by the rows of this replica.

    A number that was computed from this replica's rows is a mean over them for `Mean`, and a sum over them for `Sum`.
    """
    if update.__func__.__qualname__ not in ("Mean.update_state", "Sum.update_state"):  # type: ignore[attr-defined]
        return args, kwargs  # A subclass of Keras's, which calls one of these.
    values, weight = _values_and_weight(*args, **kwargs)
    is_variable = isinstance(values, (keras.Variable, tf.Variable))
    values = tf.convert_to_tensor(values) if is_variable else values  # Which Keras's function returns as they are.
    tensor = keras.ops.convert_to_tensor(values)
    if not isinstance(tensor, tf.Tensor):
        return args, kwargs
    if has_rows(step, tensor):
        local_losses.warn_of_metric(step, tensor, metric.name)
        return args, kwargs
    if isinstance(metric, keras.metrics.Sum) and known_value(values) is None and not _is_same(step, tensor):
        return args, kwargs
    # The product of two means over rows is no mean over rows: both are those of the global batch.
    # The weight that Keras gives the loss of an output is the rows of this replica, or computed from them.
    is_of_keras = any(metric is tracker for tracker in private_api.loss_trackers(step.model))
    is_of_rows = weight is not None and not is_of_keras and global_numbers.is_from_rows(step, weight)
    whole = _of_global_batch(step, tensor, is_of_rows)
    if is_of_rows:
        of_all = global_numbers.of_global_batch(step, weight, of_integers=True)
        weight = weight if of_all is None else of_all.value
    elif weight is not None and _adds_up_over_rows(step, weight):
        return (args, kwargs) if whole is None else ((whole.value, weight), {})
    if whole is None:
        local_losses.warn_of_metric(step, tensor, metric.name)
    values = values if whole is None else whole.value
    share = tf.cast(step.global_share(), metric.dtype)
    weight = share if weight is None else keras.ops.cast(weight, metric.dtype) * share
    return (values, tf.broadcast_to(weight, tf.shape(tensor))), {}


def _of_global_batch(step: steps.ReplicaStep, number: tf.Tensor, of_means: bool) -> global_numbers.GlobalNumber | None:
    """Returns a number for the global batch; in a branch that of a captured number, computed before the branch."""
    if step.graph is None or not step.is_in_inner_graph() or not tf.is_symbolic_tensor(number):
        return global_numbers.of_global_batch(step, number, of_means=of_means)
    outer = in_graph_of_step(step, number)
    with step.graph.as_default():
        return None if outer is None else global_numbers.of_global_batch(step, outer, of_means=of_means)


def _is_same(step: steps.ReplicaStep, number: tf.Tensor) -> bool:
    """Returns whether a number was computed from no rows, and is so the same on all replicas: a variable."""
    return can_read(step, number) and not reader_of(step).may_differ(number)


def _values_and_weight(values: Any, sample_weight: Any = None) -> tuple[Any, Any]:
    return values, sample_weight


def _adds_up_over_rows(step: steps.ReplicaStep, weight: Any) -> bool:
    """Returns whether a weight is the number of this replica's rows, or a sum over them, rather than a constant."""
    value = known_value(weight)
    if keras.ops.ndim(weight) != 0 or isinstance(weight, float):
        return False
    return value is None or value == step.held_rows


def _of_all_replicas(step: steps.ReplicaStep, structure: Any) -> Any:
    """Replaces the tensors in the arguments of `update_state` by those of the global batch."""
    dense = [private_api.as_dense_tensor(v) for v in tf.nest.flatten(structure)]
    parts = [tensors_of(v) for v in dense]
    tensors = {id(t): t for part in parts for t in part}
    found = {} if step.is_in_inner_graph() else step.gathered
    missing = [t for key, t in tensors.items() if key not in found]
    if step.is_in_inner_graph():
        found = {}
    rows = [t for t in missing if has_rows(step, t)]
    numbers = [t for t in missing if not has_rows(step, t)]
    for tensor, whole in zip(rows, gather_rows(step, rows) if rows else []):
        found[id(tensor)] = (tensor, whole)  # Keeps the tensor alive too, so that its id stays unique.
    for tensor, whole in zip(numbers, together(step, numbers)):
        found[id(tensor)] = (tensor, whole)
    whole_leaves = [with_tensors(v, [found[id(t)][1] for t in part]) for v, part in zip(dense, parts)]
    return tf.nest.pack_sequence_as(structure, whole_leaves)


def together(step: steps.ReplicaStep, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Combines tensors without rows over all replicas.

    Args:
        step: The step of this replica.
        values: Tensors of the same shape on each replica.

    Returns:
        For floats, their means weighted by rows. Integers that were computed from the batch are counts, and are summed;
        other integers and booleans are those of replica 0.
    """
    if not values:
        return []
    rows = tf.cast(1.0 if step.rows is None else step.rows, tf.float64)
    *of_replicas, rows_of_all = gather_values(step, [*values, rows])
    return [_combined(value, parts, rows_of_all) for value, parts in zip(values, of_replicas)]


def _combined(value: tf.Tensor, parts: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    rows = tf.reshape(rows, [-1, *[1] * value.shape.rank])
    if value.dtype.is_floating:
        weighted = parts * tf.cast(rows / tf.reduce_sum(rows), value.dtype)
        return tf.reduce_sum(tf.where(rows > 0, weighted, 0), 0)
    if value.dtype.is_integer and comes_from_batch(value):
        return tf.reduce_sum(tf.where(rows > 0, parts, 0), 0)
    return parts[0]
