"""`ReplicaStep`: the state of one replica during one call of `strategy.run`, above all its rows and the total rows.

That N workers give the results of one worker on the same global batch depends on weights. A replica with `rows` of the
`total_rows` of a global batch contributes `rows / total_rows` to every mean over that batch. tf.distribute uses
`1 / replicas` instead, which is correct only when all replicas hold equally many rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.communication.reducer import times
from tfdistkit.strategies.sync import row_counts
from tfdistkit.strategies.sync.placeholder_rows import hide_rows, with_placeholder

_LOCAL = threading.local()


@dataclasses.dataclass(eq=False)
class Attempt:
    """Code of a step that may run again; what it writes is dropped.

    Args:
        has_writes: Whether it wrote anything.
    """

    has_writes: bool = False


class ReplicaStep:
    """The state of one replica during one call of `strategy.run`.

    Args:
        rows: Rows of the batch on this replica, a scalar float32 tensor; None if no argument has a batch dimension,
            and then all replicas have the same weight.
        sum_rows: Returns the number of rows of the global batch, a scalar float32 tensor, for this step. Called at
            most once, and only if a weight is needed, because it may communicate.
        replicas: The number of replicas in sync.
        replica_id: The id of this replica.
        static_rows: The rows of the tensors if they are known while tracing, else None.
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
        self.in_keras_step = self.in_test_step = False
        # Whether both the train step and the optimizer are Keras's own.
        self.in_stock_train_step = False
        # Whether an empty part holds a placeholder row (`batch_sharding.KerasPart`).
        self.has_placeholder = False
        # Raises an error, or returns an operation that does, if the tensors of the batch have different rows.
        self.check_rows: Callable[[], Any] = lambda: None
        # Whether the loss of the gradients is already weighted by `share()`.
        self.loss_is_weighted = False
        # Whether the step trains on the rows of this replica alone: an algorithm averages the weights later.
        self.is_local = False
        # Whether it computes results of metrics from the rows of all replicas: yes, unless the step is local.
        self.merges_results = True
        self.gradients_are_reduced = False
        self.updates_alone = False
        self.is_summing = False
        self.layer_state: list[Any] = []
        # Names of gradients, with whether they are rows of IndexedSlices; and of what is the same on all replicas, and
        # what is known of the graph (`aggregates`).
        self.gradients: dict[str, bool] = {}
        self.same_on_all: set[str] = set()
        # Names of inputs of losses that were gathered from all replicas, with gradients (`losses.whole_batch`).
        self.gathered_inputs: set[str] = set()
        self.graph_reader: Any = None
        self.numbers: Any = None
        # Whether its tensors hold the rows of all replicas (`metric_updates.WholeBatch`); and a condition on the
        # rows of this replica whose branches are being traced (`global_conditions`), if any.
        self.sees_all_rows, self.own_condition = False, None
        # The model of a Keras step; the rows of its global batch, if known while tracing; whether it has ragged ones.
        self.model: Any = None
        self.static_total: int | None = None
        self.has_ragged = False
        # Inputs of metrics, merged state, results with their metric and place (`metric_updates`, `metric_results`).
        self.gathered: dict[int, tuple[Any, Any]] = {}
        self.merged: dict[int, Any] = {}
        self.results: dict[int, tuple[Any, Any, int]] = {}
        # The layers of an eager step, by id, with the losses that they added (`layer_losses`).
        self.losses: dict[int, tuple[Any, list[Any]]] = {}
        # The losses that are being called, the innermost last (`losses.whole_batch`), and the one that is tried.
        self.loss_calls: list[Any] = []
        self.attempt: Attempt | None = None
        # Measures the sums of this step (`step_clock`), and counts its bytes (`communication.traffic`), if not None.
        self.clock: Any = None
        self.traffic: Any = None
        self._own_traces = object()
        self._sum_rows = sum_rows
        self._total: tf.Tensor | None = None
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @property
    def traces(self) -> Any:
        """A cache key for the traces of tf.functions that this step calls.

        A step in a graph has its own key. Eager steps share traces, which read the rows at every call.
        """
        if self._graph is not None:
            return self.attempt or self._own_traces  # What writes nothing in an attempt writes afterwards.
        flags = (self.in_keras_step, self.in_stock_train_step, self.loss_is_weighted, self.gradients_are_reduced)
        more = (self.updates_alone, self.is_local, self.attempt is not None)
        return (self.replicas, self.replica_id, self._rows is None, *flags, *more)

    @property
    def rows(self) -> tf.Tensor | None:
        """Rows of the batch on this replica, a scalar float32 tensor; None if nothing has a batch dimension."""
        if self._rows is not None and self._is_in_function_of_eager_step():
            return _at_call(lambda: _require_current().rows)
        return self._rows

    @property
    def static_rows(self) -> int | None:
        """The rows if they are known while tracing, else None."""
        return None if self.has_placeholder and self._static_rows == 1 else self.held_rows

    @property
    def held_rows(self) -> int | None:
        """The rows of the tensors, with a placeholder row, if they are known while tracing, else None."""
        return None if self._is_in_function_of_eager_step() else self._static_rows

    def hide_static_rows(self) -> int:
        """Forgets the static number of rows, and returns it; 0 if it is unknown, or the step is eager."""
        if self.is_eager:
            return 0
        known, self._static_rows = self._static_rows, None
        return known or 0

    def _is_in_function_of_eager_step(self) -> bool:
        return self._graph is None and not tf.executing_eagerly()

    def add_layer_state(self, state: Any) -> None:
        """Records a layer's state that this step writes, to be synchronized at its end."""
        if not any(one is state for one in self.layer_state):
            self.layer_state.append(state)
        if self._is_in_function_of_eager_step():
            # Later eager steps call this trace without running this Python code.
            _at_call(lambda: _note_layer_state(state))

    @property
    def total_rows(self) -> tf.Tensor:
        """Rows of the global batch, a scalar float32 tensor."""
        if self._is_in_function_of_eager_step():
            return _at_call(lambda: _require_current().total_rows)
        if self._total is None:
            # A branch or a loop may be the first to need it; a tensor of its inner graph could not be used outside.
            with contextlib.nullcontext() if self._graph is None else self._graph.as_default():
                check = self.check_rows()
                with tf.control_dependencies([] if check is None else [check]), self.summing():
                    self._total = tf.identity(self._sum_rows(self))
        return self._total

    @property
    def in_update(self) -> bool:
        """Whether an optimizer or a reducer runs, whose numbers and branches are not those of the step's own code."""
        return self.gradients_are_reduced or self.is_summing

    @property
    def is_eager(self) -> bool:
        """Whether the step runs eagerly."""
        return self._graph is None

    @property
    def graph(self) -> tf.Graph | None:
        """The graph that the step is traced in; None for an eager step."""
        return self._graph

    def is_in_inner_graph(self) -> bool:
        """Returns whether a branch, a loop or a tf.function inside of the step is being traced."""
        return (None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()) is not self._graph

    def share(self) -> tf.Tensor | float:
        """Returns this replica's weight in a mean over the rows that the step trains on: 1 in a local step."""
        return 1.0 if self.is_local else self.global_share()

    def global_share(self) -> tf.Tensor | float:
        """Returns this replica's weight in a mean over the global batch; the weights of all replicas sum to 1.

        In float64, for float64 models; cast to float32 it equals the quotient in float32.
        """
        if self.rows is None:
            return 1.0 / self.replicas
        return tf.math.divide_no_nan(tf.cast(self.rows, tf.float64), tf.cast(self.total_rows, tf.float64))

    def sum_like_global(self, value: tf.Tensor) -> tf.Tensor:
        """Returns what a sum over this replica's rows would be over as many rows as the global batch has."""
        return tf.math.divide_no_nan(value, tf.cast(self.global_share(), value.dtype))

    @property
    def may_be_empty(self) -> bool:
        """Whether this replica may hold no rows; then it computes with a placeholder row (`with_placeholder`)."""
        return self.rows is not None and not self.static_rows

    def if_any_rows(self, value: tf.Tensor, otherwise: Any = 0) -> tf.Tensor:
        """Returns a value, or `otherwise` where this replica holds no rows."""
        if not self.may_be_empty:
            return value
        return tf.where(tf.greater(self.rows, 0), value, tf.cast(otherwise, value.dtype))

    def weighted(self, gradients: list[Any]) -> list[Any]:
        """Multiplies gradients of a mean over this replica's rows by its weight in the global batch.

        Args:
            gradients: Tensors or IndexedSlices.
        """
        share = self.share()
        return gradients if self.is_local else [times(g, share) for g in gradients]

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over the replicas whose rows the step trains on: in a local step, returns it."""
        return value if self.is_local else self.sum_of_all(value)

    def sum_of_all(self, value: tf.Tensor) -> tf.Tensor:
        """Sums a tensor over all replicas, including replicas without rows."""
        with self.summing():
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    @contextlib.contextmanager
    def summing(self) -> Iterator[None]:
        """Marks sums over the replicas in its body as ours; in other sums a placeholder row adds zero."""
        before, self.is_summing = self.is_summing, True
        try:
            yield
        finally:
            self.is_summing = before

    @contextlib.contextmanager
    def attempting(self) -> Iterator[Attempt]:
        """Drops and notes what its body writes to variables, because the body may have to run again, with all rows."""
        before, self.attempt = self.attempt, Attempt()
        try:
            yield self.attempt
        finally:
            self.attempt = before

    def drops_write(self) -> bool:
        """Returns whether a write to a variable must be dropped; notes it."""
        if self.attempt is not None:
            self.attempt.has_writes = True
        return self.attempt is not None

    def weighted_sum(self, value: tf.Tensor) -> tf.Tensor:
        """Sums `value * share()` over all replicas, except replicas without rows, whose value may be NaN."""
        return self.sum(self.without_empty([value * tf.cast(self.share(), value.dtype)])[0])

    def begin_keras_step(self, data: Any, is_stock: bool, is_local: bool = False) -> Any:
        """Begins a step of Keras.

        Args:
            data: This replica's batch.
            is_stock: Whether it is Keras's own train step.
            is_local: Whether it trains on the rows of this replica alone.

        Returns:
            The batch, with a placeholder row if it had none.
        """
        self.in_keras_step, self.in_stock_train_step, self.is_local = True, is_stock, is_local
        self.has_ragged = any(isinstance(value, tf.RaggedTensor) for value in tf.nest.flatten(data))
        if self.has_placeholder:
            return data
        # A worker's own data: its loss is a mean over the targets; other tensors may have other numbers of rows.
        self.check_rows = lambda: None
        targets = row_counts.count_rows(data[1]) if isinstance(data, tuple) and len(data) > 1 else (None, None)
        if targets[0] is not None:
            self._rows, self._static_rows = targets
        data = with_placeholder(data, tf.equal(self.rows, 0)) if self.may_be_empty else data
        # Batches that the user distributed may have static numbers of rows, which could not be told from others.
        return hide_rows(data, self.hide_static_rows())

    def without_empty(self, tensors: list[Any]) -> list[Any]:
        """Returns `tensors` (dense or IndexedSlices), or zeros where this replica holds no rows.

        A mean over no rows is NaN, and one NaN would spoil the sum of all replicas.
        """
        if not self.may_be_empty or not tensors:
            return tensors
        flat = tf.nest.flatten(tensors, expand_composites=True)
        # Only values can be NaN. Indices of IndexedSlices pass as they are: `sparse_lookups` reads their graph.
        values = [t for t in flat if t.dtype.is_floating]
        kept = tf.cond(
            tf.greater(self.rows, 0),
            lambda: [tf.identity(t) for t in values],
            lambda: [tf.zeros_like(t) for t in values],
        )
        of_values = iter(tf.nest.flatten(kept))
        merged = [next(of_values) if t.dtype.is_floating else t for t in flat]
        return tf.nest.pack_sequence_as(tensors, merged, expand_composites=True)

    def begin_sum(self, parts: Any) -> Callable[[Any], None]:
        """Measures a sum over the replicas, if the step has a clock.

        Args:
            parts: The summands of this replica.

        Returns:
            A function to call with the sums.
        """
        return (lambda sums: None) if self.clock is None else self.clock.begin_sum(parts)

    @contextlib.contextmanager
    def reduced_gradients(self) -> Iterator[None]:
        """Marks gradients in its body as already summed over the replicas."""
        self.gradients_are_reduced = True
        try:
            yield
        finally:
            self.gradients_are_reduced = False

    @contextlib.contextmanager
    def updating_alone(self) -> Iterator[None]:
        """Marks its body as an update of variables by this replica only, on behalf of all."""
        self.updates_alone = True
        try:
            yield
        finally:
            self.updates_alone = False


def _at_call(value: Callable[[], Any]) -> tf.Tensor:
    """Returns a scalar float32 tensor that is computed anew at every call of the tf.function that is being traced."""
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.capture_call_time_value(value, tf.TensorSpec([], tf.float32))


def _require_current() -> ReplicaStep:
    step = current()
    assert step is not None  # A trace of a step is called only in steps.
    return step


def _note_layer_state(state: Any) -> tf.Tensor:
    _require_current().add_layer_state(state)
    return tf.zeros([])


def current() -> ReplicaStep | None:
    """Returns the current step of this thread; None outside of `strategy.run` and with one replica."""
    return getattr(_LOCAL, "step", None)


def note_same_on_all(ranks: int, tensor: Any) -> None:
    """Notes that a tensor of the current step is the same on a number of replicas: the result of a collective."""
    step = current()  # Names of tensors of inner graphs are not unique.
    if step is not None and not step.is_eager and not step.is_in_inner_graph() and ranks == step.replicas:
        step.same_on_all.update([tensor.name] if tf.is_symbolic_tensor(tensor) else [])


def predicting_model() -> Any:
    """Returns the model whose `predict` this thread runs, for whose step Keras has no hook; None outside of it."""
    return getattr(_LOCAL, "predicting", None)


@contextlib.contextmanager
def predicting(model: Any) -> Iterator[None]:
    """Marks the steps of this thread as steps of a model's `predict`."""
    before = predicting_model()
    _LOCAL.predicting = model
    try:
        yield
    finally:
        _LOCAL.predicting = before


@contextlib.contextmanager
def running(step: ReplicaStep | None) -> Iterator[None]:
    """Makes `step` the current one of this thread."""
    before = current()
    _LOCAL.step = step
    try:
        yield
    finally:
        _LOCAL.step = before


def own_function_context(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes TensorFlow trace a tf.function that a step calls for this step only.

    A trace in a step captures tensors of its graph, and registers layer state to synchronize at the end of the step.
    The trace of an earlier step would give an error ("out of scope"), or state that is not synchronized.
    """
    context = original(*args, **kwargs)
    step = current()
    return context if step is None else context._replace(context=(context.context, step.traces))
