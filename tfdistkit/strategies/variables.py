"""Variables that are synchronized without `merge_call`: layer state, the step counter, sums of metrics."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import row_sums
from tfdistkit.strategies.sync.gradients import trial
from tfdistkit.strategies.sync.gradients.sparse_gradients import sum_over_replicas

_LOCAL = threading.local()
# By id: variables are not hashable.
_of_optimizers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


# How the names of variables of tfdistkit begin, which each replica writes for itself.
OWN_NAME = "tfdistkit_"

# Aggregations of TensorFlow that change what is written.
_DECLARED = (tf.VariableAggregation.SUM, tf.VariableAggregation.ONLY_FIRST_REPLICA)

# Modules between a read of a variable and who reads it.
_READING = ("tensorflow.", "tfdistkit.", "keras.src.backend.", "keras.src.ops.", "keras.src.utils.")

# Dtypes of state that is synchronized: no strings or booleans, and no seeds, which are unsigned.
_STATE = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64)


@contextlib.contextmanager
def of_an_optimizer() -> Iterator[None]:
    """Marks variables that this thread creates in its body as those of an optimizer."""
    before, _LOCAL.makes_optimizer = _makes_optimizer(), True
    try:
        yield
    finally:
        _LOCAL.makes_optimizer = before


def _reader_is_keras() -> bool:
    """Returns whether a layer of Keras reads a variable, rather than code of the user's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if not name.startswith(_READING):
            return name.startswith("keras.src.")
        frame = frame.f_back
    return False


def _makes_optimizer() -> bool:
    return getattr(_LOCAL, "makes_optimizer", False)


def is_of_optimizer(variable: Any) -> bool:
    """Returns whether an optimizer made a variable of TensorFlow in the scope of a strategy of ours."""
    return _of_optimizers.get(id(variable)) is variable


def _average_weights(step: Any) -> None:
    """Averages the weights that a step wrote from the rows of its replica, weighted by rows."""
    weights = [one for one in step.layer_state if one.trainable]
    step.layer_state = [one for one in step.layer_state if not one.trainable]
    local = [tf.convert_to_tensor(one) for one in weights]
    with step.summing():
        sums = sum_over_replicas(step.without_empty([one * tf.cast(step.share(), one.dtype) for one in local]))
    for weight, value in zip(weights, sums):
        weight.write_local(value)


class StepVariable(private_api.MirroredVariable):
    """A variable that a step may write by itself. A trial step writes nothing, and reads what it would have written."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        with trial.assigning():
            return super().assign(value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        with trial.subtracting():
            return super().assign_sub(value, *args, **kwargs)

    def value(self) -> Any:
        is_other = trial.written_value(self) is not None or self._is_read_again()
        return self._get() if is_other else super().value()

    def _get(self) -> Any:
        step = steps.current()
        if self.trainable and self._is_read_again():
            _average_weights(step)  # A step of gradient descent wrote them all: one collective.
        own, written = super()._get(), trial.written_value(self)
        is_read_again = step is not None and self._is_read_again()
        if step is None or (written is None and not is_read_again):
            return own
        now = own if written is None else written
        if is_read_again:
            now = step.weighted_sum(tf.convert_to_tensor(now))
        # A read of the variable, to gradients and to those who read the graph.
        read = tf.stop_gradient(now) + (own - tf.stop_gradient(own))
        steps.note_same_on_all(step.replicas, read)
        return read

    def _is_read_again(self) -> bool:
        """Returns whether code of the user's reads what this step wrote from the rows of its replica.

        It is averaged now, rather than at the end of the step. Layers of Keras read moving statistics again only to
        move them once more; weights, which a step of gradient descent wrote, they compute with.
        """
        step = steps.current()
        if step is None or not any(one is self for one in step.layer_state):
            return False
        return self._is_written_by(step) and not step.is_in_inner_graph() and (self.trainable or not _reader_is_keras())

    def write_local(self, value: tf.Tensor) -> None:
        """Writes this replica's copy; in a trial step, what it reads from now on."""
        trial.record_merged(self, value)
        self._get_on_device_or_primary().assign(value)

    def _is_written_by(self, step: steps.ReplicaStep) -> bool:
        """Returns whether a Keras step writes by itself, and not by an optimizer or a reducer."""
        return step.in_keras_step and not step.is_local and not step.in_update

    def _of_all_rows(self, value: Any) -> Any:
        """Returns a value that a Keras step writes, for the global batch; the given one where it is not known."""
        step = steps.current()
        if step is None or not self._is_written_by(step):
            return value
        total = row_sums.of_branch(step, value)
        total = row_sums.of_global_batch(step, value) if total is None else total
        return value if total is None else total

    def _step_that_writes(self, value: Any) -> Any:
        """Returns the Keras step that writes to a weight what comes from its replica's rows; None for any other write.

        An optimizer writes what is equal on all replicas. The writes of a step by itself are recorded for its trial.
        """
        step = steps.current()
        if step is None or not self._is_written_by(step):
            return None
        is_own = row_sums.may_be_of_rows(step, value) or bool(step.layer_state)
        trial.record_write(self, value, is_compared=is_own)
        return step if is_own else None


class LayerState(StepVariable):
    """Non-trainable state of a layer or a model: moving statistics, counts, a codebook, weights averaged over steps.

    Keras and TensorFlow create it without aggregation, so the copies of the replicas would diverge. What adds up over
    rows is summed when it is written (`row_sums`), and what comes from no row is written as it is. Other floats are
    averaged, weighted by rows: inside a Keras step they are written locally and synchronized with all other state at
    the end of the step, in one collective; in other steps at once, if the variable says so (gradients that a loop
    accumulates are summed when they are applied). What `aggregation` says beyond a mean counts in other steps, and in
    eager ones: one process knows none. Other integers stay as each replica writes them, and rows themselves are
    refused. In a local step state stays local, and a placeholder row writes nothing.
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = steps.current()
        own = self._get_on_device_or_primary()
        if step is not None and step.drops_write():
            return own
        if self.aggregation in _DECLARED and (step is None or step.is_eager or not step.in_keras_step):
            return super()._update_replica(update_fn, value, **kwargs)
        if step is None:
            return update_fn(own, value, **kwargs)
        if step.sees_all_rows:
            trial.record_write(self, value)
            return update_fn(own, value, **kwargs)
        if step.is_local:
            return self._update_locally(step, update_fn, value, **kwargs)
        if isinstance(value, tf.IndexedSlices):
            if row_sums.is_of_rows(step, value.values) or row_sums.is_of_rows(step, value.indices):
                raise _rows_stored(self)
            return update_fn(self._get_on_device_or_primary(), value, **kwargs)
        total = row_sums.of_branch(step, value)
        total = row_sums.of_global_batch(step, value) if total is None else total
        if total is not None:
            value = total
        elif row_sums.holds_rows(step, value):
            raise _rows_stored(self)
        trial.record_write(self, value)
        is_own = total is None and not row_sums.is_same_on_all(step, value)
        # A static number of rows looks like any other, and a replica without rows has none: both take one way.
        known = step.held_rows is not None
        if self.dtype.is_floating and step.in_keras_step and (is_own or step.layer_state):
            step.add_layer_state(self)  # Other state of this step, which this may hold, differs until its end.
        elif self.aggregation == tf.VariableAggregation.MEAN and (is_own or (total is None and known)):
            value = step.weighted_sum(tf.convert_to_tensor(value, self.dtype))
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

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        part.assign = functools.partial(self._assign_part, key)  # As `tf.Variable` does.
        return part

    def _assign_part(self, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        places = tf.reshape(tf.range(tf.size(self)), self.shape)[key]
        values = tf.broadcast_to(tf.cast(value, self.dtype), tf.shape(places))
        flat = [tf.reshape(self, [-1]), tf.reshape(places, [-1, 1]), tf.reshape(values, [-1])]
        return self.assign(tf.reshape(tf.tensor_scatter_nd_update(*flat), self.shape))

    # Written as a whole: what of the rows of a replica adds up is found in the graph of the value.
    def scatter_nd_add(self, indices: Any, updates: Any, name: Any = None) -> Any:
        """Adds as `tf.Variable` does, which TensorFlow's variables of several replicas lack."""
        return self.assign(tf.tensor_scatter_nd_add(self, indices, tf.cast(updates, self.dtype)))

    def scatter_nd_sub(self, indices: Any, updates: Any, name: Any = None) -> Any:
        """Subtracts as `tf.Variable` does."""
        return self.assign(tf.tensor_scatter_nd_sub(self, indices, tf.cast(updates, self.dtype)))

    def scatter_nd_update(self, indices: Any, updates: Any, name: Any = None) -> Any:
        """Assigns as `tf.Variable` does."""
        return self.assign(tf.tensor_scatter_nd_update(self, indices, tf.cast(updates, self.dtype)))

    def scatter_add(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_written_by_user():
            return self._scattered(self.scatter_nd_add, sparse_delta)
        return super().scatter_add(sparse_delta, *args, **kwargs)

    def scatter_sub(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_written_by_user():
            return self._scattered(self.scatter_nd_sub, sparse_delta)
        return super().scatter_sub(sparse_delta, *args, **kwargs)

    def scatter_update(self, sparse_delta: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_written_by_user():
            return self._scattered(self.scatter_nd_update, sparse_delta)
        return super().scatter_update(sparse_delta, *args, **kwargs)

    def _scattered(self, write: Callable[..., Any], rows: tf.IndexedSlices) -> Any:
        write(tf.expand_dims(rows.indices, -1), rows.values)
        return self

    def _is_written_by_user(self) -> bool:
        step = steps.current()
        return step is not None and self._is_written_by(step)


class Weight(StepVariable):
    """A trainable weight, which a step may also assign by itself: `weight.assign_sub(0.1 * gradient)`.

    What comes from the rows of a replica, or from state that is averaged at the end of the step, is averaged then, too,
    weighted by rows: this is exact for steps of gradient descent. An optimizer writes what is equal on all replicas.
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        value = self._of_all_rows(value)
        step = self._step_that_writes(value)
        if step is not None:
            step.add_layer_state(self)
        return super()._update_replica(update_fn, value, **kwargs)


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
        value = self._if_any_rows(value, self._get_on_device_or_primary)
        with trial.assigning():
            self._record(value)
        return super().assign(value, *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        value = self._if_any_rows(value, lambda: 0)
        self._record(value)
        return super().assign_add(value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return super().assign_sub(self._if_any_rows(value, lambda: 0), *args, **kwargs)

    def _record(self, value: Any) -> None:
        # A metric that is updated with the rows of all replicas has its state only once.
        if steps.current() is not None and self.aggregation == tf.VariableAggregation.SUM:
            trial.record_write(self, value, trial.Merged.SUM)

    def _if_any_rows(self, value: Any, otherwise: Callable[[], Any]) -> Any:
        step = steps.current()
        if step is None or not step.in_keras_step or not step.may_be_empty:
            return value
        return step.if_any_rows(tf.convert_to_tensor(value, self.dtype), otherwise())


def own_arguments(created_with: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which a variable is created in place of those of the user.

    A variable that each replica keeps for itself until it is read, and that is then that of the first replica or a
    mean, is state like any other: its replicas agree on it when a Keras step writes it. Metrics are sums.
    """
    aggregation = created_with.get("aggregation")
    is_kept = created_with.get("synchronization") == tf.VariableSynchronization.ON_READ
    if not is_kept or aggregation in (None, tf.VariableAggregation.SUM) or created_with.get("trainable"):
        return created_with
    if aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        aggregation = tf.VariableAggregation.NONE  # A loop of the user's own writes that of each replica.
    auto = tf.VariableSynchronization.AUTO
    return {**created_with, "synchronization": auto, "aggregation": aggregation, "trainable": False}


def as_own_variable(variable: Any, created_with: dict[str, Any]) -> Any:
    """Converts a mirrored variable to `LayerState` if it was created as such: not trainable, or an integer.

    Or to a `StepCounter`, if an optimizer made it, under the name that Keras gives to `optimizer.iterations`. Variables
    of optimizers, whose gradients are equal on all replicas, and those of tfdistkit stay as they are.
    """
    if _makes_optimizer():
        _of_optimizers[id(variable)] = variable
    if type(variable) is private_api.SyncOnReadVariable:
        variable.__class__ = ReplicaSum
    if type(variable) is not private_api.MirroredVariable:
        return variable
    name = created_with.get("name") or ""
    if _makes_optimizer() and name == "iteration" and variable.dtype.is_integer:
        variable.__class__ = StepCounter
    is_mean = variable.aggregation == tf.VariableAggregation.MEAN and variable.dtype.is_floating
    is_of_user = variable.dtype in _STATE and not _makes_optimizer() and not name.startswith(OWN_NAME)
    # TensorFlow's variables are trainable unless the user says otherwise; no optimizer trains integers.
    is_state = created_with.get("trainable") is False or not variable.dtype.is_floating
    if is_state and (is_mean or is_of_user):
        variable.__class__ = LayerState
    elif is_of_user and variable.aggregation == tf.VariableAggregation.NONE and not is_state:
        variable.__class__ = Weight
    return variable


def _rows_stored(variable: Any) -> UnsupportedError:
    return UnsupportedError(
        explain(
            "State that stores rows of the batch (a queue, a memory bank) must store those of all replicas.",
            received=f"rows of one replica, for the variable {variable.name!r}",
            expected="the same value on all replicas",
            do="Gather the rows first: `rows = tfdistkit.collectives.all_gather(rows)`. In one process this changes "
            "nothing.",
        )
    )


def to_python(original: Any, variable: Any, kind: type) -> Any:
    """Converts a mirrored Keras variable by `float(variable)` or `int(variable)`, which TensorFlow lacks."""
    if isinstance(variable.value, tf.distribute.DistributedValues) and variable.ndim == 0:
        return kind(variable.value.numpy())
    return original(variable)
