"""What one replica knows while it runs one call of `strategy.run`: its rows, everybody's rows.

The promise - N workers give what one worker gives on the same global batch - comes down to weights. A
replica that holds `rows` of the `total_rows` of a global batch contributes `rows / total_rows` to every
mean over that batch. tf.distribute uses `1 / replicas` instead, which is the same only when all replicas
hold equally many rows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.data import rows
from tfdistkit.strategies.sync.placeholder_rows import with_stand_in

_LOCAL = threading.local()


class ReplicaStep:
    """One replica's view of one call of `strategy.run`.

    Args:
        rows: Rows of the batch on this replica, a scalar float32 tensor; None when nothing in the
            arguments has a batch dimension, and then all replicas weigh the same.
        sum_rows: Makes the number of rows of the global batch, a scalar float32 tensor, of this step. Called at
            most once, and only if a weight is asked for, because it may communicate.
        replicas: How many replicas there are in sync.
        replica_id: Which of them this is.
        static_rows: The rows of the tensors as far as they are known while tracing, else None.
    """

    def __init__(
        self,
        rows: tf.Tensor | None,
        sum_rows: Callable[[ReplicaStep], tf.Tensor],
        replicas: int,
        replica_id: int,
        static_rows: int | None = None,
    ):
        self._rows = rows
        self._static_rows = static_rows
        self.replicas = replicas
        self.replica_id = replica_id
        self.in_keras_step = False
        # Whether it is Keras's own train step, and an optimizer of Keras's that nobody changed.
        self.in_stock_train_step = False
        # Whether a row stands in where there are none (`batch_parts.KerasPart`).
        self.has_stand_in = False
        # Raises an error, or makes an operation that does, where the tensors of the batch have different rows.
        self.check_rows: Callable[[], Any] = lambda: None
        # Whether the loss that the gradients come of was weighted by `share()` already.
        self.loss_is_weighted = False
        self.gradients_are_reduced = False
        self.updates_alone = False
        self.is_summing = False
        self.layer_state: list[Any] = []
        # The model whose step it is, in a Keras step.
        self.model: Any = None
        # What metrics saw and came to in this step: `metric_updates`, `metric_results`.
        self.gathered: dict[int, tuple[Any, Any]] = {}
        self.merged: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        # What measures the sums of this step, if something does (`step_clock`).
        self.clock: Any = None
        self._own_traces = object()
        self._sum_rows = sum_rows
        self._total: tf.Tensor | None = None
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @property
    def traces(self) -> Any:
        """What tells the traces of tf.functions that this step calls from those of other steps.

        A step in a graph has its own. Eager steps share theirs, for which the rows are looked up at every call.
        """
        if self._graph is not None:
            return self._own_traces
        flags = (self.in_keras_step, self.in_stock_train_step, self.loss_is_weighted, self.gradients_are_reduced)
        return (self.replicas, self.replica_id, self._rows is None, *flags, self.updates_alone)

    @property
    def rows(self) -> tf.Tensor | None:
        """Rows of the batch on this replica, a scalar float32 tensor; None if nothing has a batch dimension."""
        if self._rows is not None and self._is_in_function_of_eager_step():
            return _at_call(lambda: _require_current().rows)
        return self._rows

    @property
    def static_rows(self) -> int | None:
        """The rows as far as they are known while tracing."""
        return None if self.has_stand_in and self._static_rows == 1 else self.held_rows

    @property
    def held_rows(self) -> int | None:
        """The rows of the tensors as far as they are known while tracing: with one that stands in for none."""
        return None if self._is_in_function_of_eager_step() else self._static_rows

    def _is_in_function_of_eager_step(self) -> bool:
        return self._graph is None and not tf.executing_eagerly()

    def add_layer_state(self, state: Any) -> None:
        """Takes note of a layer's state that this step writes, to be agreed on at its end."""
        if not any(one is state for one in self.layer_state):
            self.layer_state.append(state)
        if self._is_in_function_of_eager_step():
            # The next eager step calls what is traced here, and does not come by.
            _at_call(lambda: _note_layer_state(state))

    @property
    def total_rows(self) -> tf.Tensor:
        """Rows of the global batch, a scalar float32 tensor."""
        if self._is_in_function_of_eager_step():
            return _at_call(lambda: _require_current().total_rows)
        if self._total is None:
            # A branch or a loop may ask first; what it makes in its own graph could not be used outside of it.
            with contextlib.nullcontext() if self._graph is None else self._graph.as_default():
                check = self.check_rows()
                with tf.control_dependencies([] if check is None else [check]):
                    self._total = tf.identity(self._sum_rows(self))
        return self._total

    @property
    def is_eager(self) -> bool:
        """Whether the step runs eagerly."""
        return self._graph is None

    @property
    def graph(self) -> tf.Graph | None:
        """The graph that the step is traced in; None for one that runs eagerly."""
        return self._graph

    def is_in_inner_graph(self) -> bool:
        """Whether a branch, a loop or a tf.function inside of the step is being traced."""
        return (None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()) is not self._graph

    def share(self) -> tf.Tensor | float:
        """This replica's part of a mean over the global batch: the shares of all replicas sum to 1.

        In float64, for models of that: cast to float32 it is the quotient of float32.
        """
        if self.rows is None:
            return 1.0 / self.replicas
        return tf.math.divide_no_nan(tf.cast(self.rows, tf.float64), tf.cast(self.total_rows, tf.float64))

    @property
    def may_be_empty(self) -> bool:
        """Whether this replica may hold no rows; then it computes with a row that counts nothing (`with_stand_in`)."""
        return self.rows is not None and not self.static_rows

    def if_any_rows(self, value: tf.Tensor, otherwise: Any = 0) -> tf.Tensor:
        """Returns a value, or `otherwise` where this replica holds no rows."""
        if not self.may_be_empty:
            return value
        return tf.where(tf.greater(self.rows, 0), value, tf.cast(otherwise, value.dtype))

    def weighted(self, gradients: list[Any]) -> list[Any]:
        """Returns gradients of a mean over this replica's rows as its parts of those of the global batch.

        Args:
            gradients: Tensors or IndexedSlices.
        """
        share = self.share()
        return [times(g, share) for g in gradients]

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over all replicas, also that of a replica without rows."""
        with self.summing():
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Within it, sums over the replicas are ours; in others a stand-in for a row adds nothing."""
        before, self.is_summing = self.is_summing, True
        try:
            yield
        finally:
            self.is_summing = before

    def weighted_sum(self, value: tf.Tensor) -> tf.Tensor:
        """Sums `value * share()` over all replicas, without what a replica made of no rows (it may be NaN)."""
        return self.sum(self.without_empty([value * tf.cast(self.share(), value.dtype)])[0])

    def begin_keras_step(self, data: Any, is_stock: bool) -> Any:
        """Begins a step of Keras.

        Args:
            data: This replica's batch.
            is_stock: Whether it is Keras's own train step.

        Returns:
            The batch, with a row if it had none.
        """
        self.in_keras_step, self.in_stock_train_step = True, is_stock
        if self.has_stand_in:
            return data
        # A worker's own data: its loss is a mean over the targets, whatever the other tensors hold.
        self.check_rows = lambda: None
        targets = count_rows(data[1]) if isinstance(data, tuple) and len(data) > 1 else (None, None)
        if targets[0] is not None:
            self._rows, self._static_rows = targets
        return with_stand_in(data, tf.equal(self.rows, 0)) if self.may_be_empty else data

    def without_empty(self, tensors: list[Any]) -> list[Any]:
        """Returns `tensors` (dense or IndexedSlices), or zeros where this replica holds no rows.

        A mean over no rows is NaN, and one NaN would spoil the sum of all replicas.
        """
        if not self.may_be_empty or not tensors:
            return tensors
        flat = tf.nest.flatten(tensors, expand_composites=True)
        # Only values can be NaN; indices and shapes of IndexedSlices pass as they are.
        kept = tf.cond(
            tf.greater(self.rows, 0),
            lambda: [tf.identity(t) for t in flat],
            lambda: [tf.zeros_like(t) if t.dtype.is_floating else tf.identity(t) for t in flat],
        )
        return tf.nest.pack_sequence_as(tensors, tf.nest.flatten(kept), expand_composites=True)

    def begin_sum(self, parts: Any) -> Callable[[Any], None]:
        """Lets a clock measure a sum over the replicas.

        Args:
            parts: What this replica adds.

        Returns:
            What is to be called with the sums.
        """
        return (lambda sums: None) if self.clock is None else self.clock.begin_sum(parts)

    @contextlib.contextmanager
    def reduced_gradients(self) -> Iterator[None]:
        """Within it, the gradients have been summed over the replicas and must not be summed again."""
        self.gradients_are_reduced = True
        try:
            yield
        finally:
            self.gradients_are_reduced = False

    @contextlib.contextmanager
    def updating_alone(self) -> Iterator[None]:
        """Within it, this replica updates variables for all, and the others do not come along."""
        self.updates_alone = True
        try:
            yield
        finally:
            self.updates_alone = False


def _at_call(value: Callable[[], Any]) -> tf.Tensor:
    """Returns a scalar float32 tensor that is made anew whenever the tf.function that is being traced is called."""
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.capture_call_time_value(value, tf.TensorSpec([], tf.float32))


def _require_current() -> ReplicaStep:
    step = current()
    assert step is not None  # A trace of a step is called in steps alone.
    return step


def _note_layer_state(state: Any) -> tf.Tensor:
    _require_current().add_layer_state(state)
    return tf.zeros([])


def current() -> ReplicaStep | None:
    """Returns the step that this thread is running; None outside of `strategy.run` and with one replica."""
    return getattr(_LOCAL, "step", None)


def is_predicting() -> bool:
    """Whether this thread is in `predict`, where Keras has no hook for its step."""
    return getattr(_LOCAL, "is_predicting", False)


@contextlib.contextmanager
def predicting() -> Iterator[None]:
    """Within it, what replicas run are steps of `predict`."""
    before = is_predicting()
    _LOCAL.is_predicting = True
    try:
        yield
    finally:
        _LOCAL.is_predicting = before


@contextlib.contextmanager
def running(step: ReplicaStep | None) -> Iterator[None]:
    """Makes `step` the current one of this thread."""
    before = current()
    _LOCAL.step = step
    try:
        yield
    finally:
        _LOCAL.step = before


def times(gradient: Any, factor: Any) -> Any:
    """Multiplies a gradient, a tensor or IndexedSlices, by a number."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(times(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def count_rows(values: Any, is_of_batch: list[bool] | None = None) -> tuple[tf.Tensor | None, int | None]:
    """Finds how many rows a batch has, by its first value that has a batch dimension.

    Args:
        values: Any structure of tensors, ragged and sparse ones included, holding one replica's values.
        is_of_batch: For each value, whether each replica has one of its own. If any has, no other counts.

    Returns:
        The rows as a scalar float32 tensor (None when no value has a batch dimension), and as an int
        when they are known while tracing (else None).
    """
    for value in _of_batch(values, is_of_batch):
        counted = rows.count_rows(value)
        if counted is not None:
            return tf.cast(counted[0], tf.float32), counted[1]
    return None, None


def same_rows(values: Any, is_of_batch: list[bool] | None = None) -> tf.Operation | None:
    """Checks that all tensors that replicas bring to `strategy.run` have as many rows.

    Args:
        values: As in `count_rows`.
        is_of_batch: As in `count_rows`.

    Returns:
        An operation that fails where they have not, if only the data tells.

    Raises:
        OptionError: if they have not.
    """
    counted = [count for value in _of_batch(values, is_of_batch) if (count := rows.count_rows(value)) is not None]
    static = sorted({known for _, known in counted if known is not None})
    if len(static) > 1:
        raise rows.which_is_the_batch(" and ".join(map(str, static)))
    dynamic = [count for count, known in counted if known is None]
    if not dynamic or len(counted) == 1:
        return None
    return rows.assert_same([*static, *dynamic])


def _of_batch(values: Any, is_of_batch: list[bool] | None) -> list[Any]:
    flat = tf.nest.flatten(values)
    if is_of_batch is None or len(is_of_batch) != len(flat) or not any(is_of_batch):
        return flat
    return [value for value, is_own in zip(flat, is_of_batch) if is_own]


def own_function_context(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets a tf.function that a step calls be traced for this step alone.

    What is traced in a step holds tensors of its graph, and registers what has to be done at the end of the step.
    TensorFlow would take the trace of an earlier step: an error ("out of scope"), or state that nobody agrees on.
    """
    context = original(*args, **kwargs)
    step = current()
    return context if step is None else context._replace(context=(context.context, step.traces))
