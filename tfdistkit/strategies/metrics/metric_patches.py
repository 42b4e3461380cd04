"""Hooks Keras's metrics: each class, when its first instance is made under a strategy of ours."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.metrics import metric_updates
from tfdistkit.strategies.metrics.metric_results import forget_merged, hooked_result
from tfdistkit.strategies.parameter_server import atomic_updates
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import row_sums
from tfdistkit.strategies.sync.gradients import trial
from tfdistkit.strategies.variables import LayerState, ReplicaSum, Weight

# Hooked methods of classes; a method hooked twice would count twice.
_HOOKED: set[tuple[type, str]] = set()


def metric_made(original: Any, metric: Any, *args: Any, **kwargs: Any) -> None:
    """Hook of `Metric.__init__`; also of metrics outside of a scope, which a loop of the user's own may update."""
    for owner in type(metric).__mro__:
        if owner is not keras.metrics.Metric and issubclass(owner, keras.metrics.Metric):
            _hook(owner, "update_state")
            if private_api.is_ours(tf.distribute.get_strategy()):
                _hook(owner, "result")
    original(metric, *args, **kwargs)


def require_scope(model: Any) -> None:
    """Checks that each replica has the state of every metric of a model.

    Raises:
        UnsupportedError: if a metric was made outside of the scope: it would count the rows of one replica only.
    """
    for metric in model.metrics:
        metric_updates.require_scope(metric)


def metric_variable(original: Any, metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of `Metric.add_variable`: replicates the state of metrics that are updated with all rows."""
    variable = original(metric, *args, **kwargs)
    if private_api.is_ours(tf.distribute.get_strategy()) and not metric_updates.adds_up_by_class(type(metric)):
        private_api.replicate_variable(variable)
    return variable


def direct_assign(original: Any, variable: Any, new: Any) -> Any:
    """Hook of Keras's `Variable._direct_assign`, which every assignment calls."""
    step = steps.current()
    if step is not None and step.drops_write():
        return None
    if step is None and private_api.is_summed(variable) and _is_outside_of_replicas():
        return private_api.assign_without_reading(variable, new)
    if step is None or not step.in_keras_step:
        return atomic_updates.direct_assign(original, variable, new)
    if private_api.is_summed(variable):
        forget_merged(step, variable)
    own = private_api.raw_variable(variable)
    if not isinstance(own, (LayerState, Weight, ReplicaSum)):  # The learning rate: TensorFlow takes the first one's.
        new = row_sums.number_of_all(step, new)
        with trial.assigning():
            trial.record_write(own, new, trial.Merged.FIRST)
    return original(variable, new)


def _is_outside_of_replicas() -> bool:
    return tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()


def _hook(owner: type, name: str) -> None:
    if name not in owner.__dict__ or (owner, name) in _HOOKED:
        return
    _HOOKED.add((owner, name))
    original = owner.__dict__[name]

    if name == "update_state":

        @functools.wraps(original)
        def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
            return metric_updates.hooked_update(self, original.__get__(self, type(self)), args, kwargs)

    else:

        @functools.wraps(original)
        def hooked(self: Any) -> Any:
            return hooked_result(self, original.__get__(self, type(self)))

    setattr(owner, name, hooked)
