"""Variables that are synchronized without `merge_call`: layer state, the step counter, sums of metrics."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import row_sums
from tfdistkit.strategies.sync import step as steps

_LOCAL = threading.local()


@contextlib.contextmanager
def of_an_optimizer() -> Iterator[None]:
    """Marks variables that this thread creates in its body as those of an optimizer."""
    with _made_by("optimizer"):
        yield


@contextlib.contextmanager
def _made_by(maker: str) -> Iterator[None]:
    before, _LOCAL.maker = _maker(), maker
    try:
        yield
    finally:
        _LOCAL.maker = before


def _maker() -> str:
    return getattr(_LOCAL, "maker", "")


class LayerState(private_api.MirroredVariable):
    """Non-trainable state of a layer, such as the moving statistics of BatchNormalization.

    Keras creates it without aggregation, so the copies of the replicas would diverge. What adds up over rows is summed
    when it is written (`row_sums`). Other floats are averaged, weighted by rows: inside a Keras step they are written
    locally and synchronized with all other state at the end of the step, in one collective; elsewhere at once. Other
    integers are the same on all replicas, or refused. In a local step state stays local, and a placeholder row writes
    nothing.
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = steps.current()
        if step is None:
            return update_fn(self._get_on_device_or_primary(), value, **kwargs)
        if step.is_local:
            return self._update_locally(step, update_fn, value, **kwargs)
        total = row_sums.of_global_batch(step, value)
        if total is not None:
            value = total
        elif self.dtype.is_integer:
            if row_sums.is_of_rows(step, value):
                raise _not_a_sum(self)
        elif not step.in_keras_step:
            value = step.weighted_sum(tf.convert_to_tensor(value, self.dtype))
        # A sum may hold other state of this step, which differs until its end.
        if step.in_keras_step and self.dtype.is_floating and (total is None or step.layer_state):
            step.add_layer_state(self)
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)

    def _update_locally(self, step: steps.ReplicaStep, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if self.dtype.is_floating:
            step.add_layer_state(self)
        if step.may_be_empty:
            return self._update_if_any_rows(step, update_fn, value, **kwargs)
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


def add_weight(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of `Layer.add_weight`: creates the state of a layer so that the replicas agree on it (`LayerState`)."""
    if private_api.is_ours(tf.distribute.get_strategy()):
        given = inspect.signature(original).bind(layer, *args, **kwargs).arguments
        dtype = keras.backend.standardize_dtype(given.get("dtype") or layer.variable_dtype)
        if given.get("trainable") is False and given.get("aggregation", "none") == "none":
            if "int" in dtype:  # TensorFlow has no mean of them.
                with _made_by("layer"):
                    return original(layer, *args, **kwargs)
            if "float" in dtype:
                kwargs["aggregation"] = "mean"
    return original(layer, *args, **kwargs)


def as_own_variable(variable: Any, created_with: dict[str, Any]) -> Any:
    """Converts a mirrored variable to `LayerState` if it was created as such: not trainable, aggregated by MEAN.

    Integers that `add_weight` makes become one too.

    Or to a `StepCounter`, if an optimizer made it, under the name that Keras gives to `optimizer.iterations`.
    """
    if type(variable) is private_api.SyncOnReadVariable:
        variable.__class__ = ReplicaSum
    if type(variable) is not private_api.MirroredVariable:
        return variable
    if _maker() == "optimizer" and created_with.get("name") == "iteration" and variable.dtype.is_integer:
        variable.__class__ = StepCounter
    is_mean = variable.aggregation == tf.VariableAggregation.MEAN and variable.dtype.is_floating
    if created_with.get("trainable") is False and (is_mean or (_maker() == "layer" and variable.dtype.is_integer)):
        variable.__class__ = LayerState
    return variable


def _not_a_sum(variable: Any) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "Integer state of a layer that is computed from the rows of a batch must be a sum over them.",
            received=f"another function of this replica's rows, for the variable {variable.name!r}",
            expected="`state.assign_add(...)` of a sum or a number of rows",
            do="Compute it from all rows, `tfdistkit.collectives.all_gather(tensor)`, or from their sums, "
            "`tfdistkit.collectives.all_reduce(ops.sum(...))`; or store a float, which is averaged.",
        )
    )
