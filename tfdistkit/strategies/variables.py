"""Variables whose replicas agree without `merge_call`: layer state, the step counter, what metrics add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import step as steps


class LayerState(private_api.MirroredVariable):
    """Non-trainable state of a layer, such as the moving statistics of BatchNormalization.

    Keras creates it without aggregation, and each replica would go its own way. Inside a Keras step it is
    written locally and summed with everything else at the end of the step, in one collective; elsewhere
    at once. Replicas weigh by their rows.
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = steps.current()
        if step is not None and step.in_keras_step:
            step.add_layer_state(self)
        elif step is not None:
            value = step.weighted_sum(tf.convert_to_tensor(value, self.dtype))
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)

    def write_local(self, value: tf.Tensor) -> None:
        """Writes this replica's copy."""
        self._get_on_device_or_primary().assign(value)


class StepCounter(private_api.MirroredVariable):
    """`optimizer.iterations`: every replica adds the same 1, so none has to be told.

    TensorFlow sends the first replica's number to the others in `merge_call`, which cannot happen in the
    branch that a LossScaleOptimizer counts in (keras#20582).
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class ReplicaSum(private_api.SyncOnReadVariable):
    """What each replica counts for itself, and is summed when it is read, such as the state of a metric.

    In a Keras step a replica without rows computes with a stand-in, of which nothing counts.
    """

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign(self._if_any_rows(value, self._get_on_device_or_primary), *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_add(self._if_any_rows(value, lambda: 0), *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_sub(self._if_any_rows(value, lambda: 0), *args, **kwargs)

    def _if_any_rows(self, value: Any, otherwise: Callable[[], Any]) -> Any:
        step = steps.current()
        if step is None or not step.in_keras_step or not step.may_be_empty:
            return value
        return step.if_any_rows(tf.convert_to_tensor(value, self.dtype), otherwise())


def as_own_variable(variable: Any, created_with: dict[str, Any]) -> Any:
    """Makes a mirrored variable `LayerState` if it was created as such: not trainable, aggregated by MEAN.

    Or a `StepCounter`, by the name that Keras gives to `optimizer.iterations`.
    """
    if type(variable) is private_api.SyncOnReadVariable:
        variable.__class__ = ReplicaSum
    if type(variable) is not private_api.MirroredVariable:
        return variable
    if created_with.get("name") == "iteration" and variable.dtype.is_integer:
        variable.__class__ = StepCounter
    if (
        created_with.get("trainable") is False
        and variable.aggregation == tf.VariableAggregation.MEAN
        and variable.dtype.is_floating
    ):
        variable.__class__ = LayerState
    return variable
