"""Variables that are synchronized without `merge_call`: layer state, the step counter, sums of metrics."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import step as steps

_LOCAL = threading.local()


@contextlib.contextmanager
def of_an_optimizer() -> Iterator[None]:
    """Marks variables that this thread creates in its body as those of an optimizer."""
    before, _LOCAL.makes_optimizer = _makes_optimizer(), True
    try:
        yield
    finally:
        _LOCAL.makes_optimizer = before


def _makes_optimizer() -> bool:
    return getattr(_LOCAL, "makes_optimizer", False)


class LayerState(private_api.MirroredVariable):
    """Non-trainable state of a layer, such as the moving statistics of BatchNormalization.

    Keras creates it without aggregation, so the copies of the replicas would diverge. Inside a Keras step it is
    written locally and synchronized with all other state at the end of the step, in one collective; elsewhere
    at once. Replicas are weighted by their rows. In a local step it stays local, and a placeholder row writes nothing.
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = steps.current()
        if step is not None and step.in_keras_step:
            step.add_layer_state(self)
            if step.is_local and step.may_be_empty:
                return self._update_if_any_rows(step, update_fn, value, **kwargs)
        elif step is not None:
            value = step.weighted_sum(tf.convert_to_tensor(value, self.dtype))
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)

    def _update_if_any_rows(self, step: steps.ReplicaStep, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        own = self._get_on_device_or_primary()
        before = tf.identity(tf.convert_to_tensor(own))
        update_fn(own, value)
        return own.assign(step.if_any_rows(tf.convert_to_tensor(own), before), **kwargs)

    def write_local(self, value: tf.Tensor) -> None:
        """Writes this replica's copy."""
        self._get_on_device_or_primary().assign(value)


class StepCounter(private_api.MirroredVariable):
    """`optimizer.iterations`: every replica adds the same 1, so no synchronization is needed.

    TensorFlow sends the first replica's number to the others in `merge_call`, which is impossible in the branch in
    which a LossScaleOptimizer counts (keras#20582).
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


class ReplicaSum(private_api.SyncOnReadVariable):
    """A variable that each replica updates for itself, and that is summed on read, such as the state of a metric.

    In a Keras step, updates from a placeholder row are dropped.
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
    """Converts a mirrored variable to `LayerState` if it was created as such: not trainable, aggregated by MEAN.

    Or to a `StepCounter`, if an optimizer made it, under the name that Keras gives to `optimizer.iterations`.
    """
    if type(variable) is private_api.SyncOnReadVariable:
        variable.__class__ = ReplicaSum
    if type(variable) is not private_api.MirroredVariable:
        return variable
    if _makes_optimizer() and created_with.get("name") == "iteration" and variable.dtype.is_integer:
        variable.__class__ = StepCounter
    if (
        created_with.get("trainable") is False
        and variable.aggregation == tf.VariableAggregation.MEAN
        and variable.dtype.is_floating
    ):
        variable.__class__ = LayerState
    return variable
