"""Runs Keras's `variable.assign(f(variable))` as one atomic addition, so that no worker's update is lost.

Workers of a parameter-server job write the same variables at the same time. TensorFlow's `assign_add` is
atomic on the server, but Keras's is `assign(self + value)`: metrics, moving statistics, seeds and
`optimizer.iterations` read, compute and write, which loses a concurrent update of another worker.

Within `running()` such a variable is read once, and an assignment adds the difference to the value that was read.
Metrics can be collected instead: they start from zero in every call, and their sums are returned to the coordinator,
which adds them up in the order of the batches. That is exact, and a step that is repeated because its worker was lost
counts once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.parameter_server import concurrent_writes
from tfdistkit.strategies.sync.data_dependence import Ancestry
from tfdistkit.strategies.variables import is_of_optimizer

_LOCAL = threading.local()


class Watcher(Protocol):
    """Told before the program itself reads or writes a variable while steps of `fit` or `evaluate` run."""

    def before_read(self, variable: Any) -> None:
        """Called before a read of a Keras variable: a callback asks for metrics or weights after each batch."""

    def before_write(self, variable: Any) -> None:
        """Called before a write of a Keras variable: a callback sets the learning rate, or resets the metrics."""

    def before_use(self, variable: Any, writes: bool = False) -> None:
        """Called before a read or a write of a variable of TensorFlow."""


# None where no steps are in flight.
watcher: Watcher | None = None


class Updates:
    """Tracks the reads and writes of one call of a step.

    Args:
        collected: Keras variables whose sums are collected and not written.

    Attributes:
        results: What metrics returned in the call.
    """

    def __init__(self, collected: Sequence[Any] = ()):
        self.collected = list(collected)
        self.results: list[Any] = []
        self._collected_ids = {id(v) for v in collected}
        self._graph = _graph()
        # By variable: its value, and the graph of that value.
        self._known: dict[int, tuple[Any, Any]] = {}
        if self.collected:
            for variable in self.collected:
                zeros = tf.zeros(variable.shape, private_api.raw_variable(variable).dtype)
                self._known[id(variable)] = (self._graph, zeros)
        self._begins = [zeros for _, zeros in self._known.values()]

    def value_of(self, variable: Any) -> Any:
        """Returns the value of a variable in this call, or None if it is not tracked."""
        if not self._holds(variable):
            return None
        graph, value = self._known.get(id(variable), (None, None))
        if value is None or not _can_see(graph):
            value = tf.convert_to_tensor(private_api.raw_variable(variable))
            self._known[id(variable)] = (_graph(), value)
        return value

    def assign(self, variable: Any, value: tf.Tensor) -> bool:
        """Adds or collects a value that a step assigns to a variable.

        Args:
            variable: A Keras variable.
            value: The new value, of its dtype and shape.

        Returns:
            False if the caller must write the variable.
        """
        if not self._holds(variable):
            # A weight: reads of it are not tracked, for a tape must see them.
            own = private_api.raw_variable(variable)
            is_read = functools.partial(concurrent_writes.is_read_of, own)
            return variable.trainable and concurrent_writes.write_sum(own, value, is_read)
        graph, read = self._known.get(id(variable), (None, None))
        here = _graph()
        collects = id(variable) in self._collected_ids
        if not collects or here is not self._graph:
            if read is None or not _can_see(graph):
                return False  # The value was not computed from one that was read here: there is no difference to add.
            own = private_api.raw_variable(variable)
            if collects:
                own.assign_add(value - read)
            else:
                concurrent_writes.write(own, value, read)
        # A value of a branch cannot be collected outside of it, and was written to the variable.
        if not collects or here is self._graph:
            # A later read has no gradient with respect to what was written, as that of a variable.
            self._known[id(variable)] = (here, tf.stop_gradient(value))
        return True

    def sums(self) -> list[tf.Tensor]:
        """Returns the sums of the collected variables, in their order."""
        return [self._known[id(v)][1] for v in self.collected]

    def sums_train(self) -> bool:
        """Returns whether what a step writes depends on the collected variables, which start from zero in each step."""
        begins = {value.name for value in self._begins}
        handles = [private_api.raw_variable(v).handle for v in self.collected]
        collected = {inner.name for outer, inner in self._graph.captures if any(outer is one for one in handles)}
        sums = Ancestry(lambda tensor: tensor.name in begins)
        for operation in self._graph.get_operations():
            resources = [one.name for one in operation.inputs if one.dtype == tf.resource]
            if operation.op_def.is_stateful and not collected.issuperset(resources):
                if any(sums.includes(one) for one in operation.inputs):
                    return True
        return False

    def _holds(self, variable: Any) -> bool:
        if id(variable) in self._collected_ids:
            return True
        if variable.trainable or private_api.raw_variable(variable) is None:
            return False
        own = private_api.raw_variable(variable)
        dtype = tf.as_dtype(own.dtype)
        # Slots of optimizers: Keras writes them with atomic operations, by their `value`.
        is_slot = variable.aggregation not in ("sum", "mean") and is_of_optimizer(own)
        return dtype.is_integer or (dtype.is_floating and not is_slot)


def current() -> Updates | None:
    """Returns the updates of the step that this thread is running; None outside of one."""
    return getattr(_LOCAL, "updates", None)


@contextlib.contextmanager
def running(collected: Sequence[Any] = ()) -> Iterator[Updates]:
    """Makes assignments of this thread to variables that all workers write atomic.

    Args:
        collected: Keras variables whose sums are collected; ignored inside of another `running()`.

    Yields:
        The updates.
    """
    outer = current()
    updates = outer or Updates(collected)
    _LOCAL.updates = updates
    try:
        yield updates
    finally:
        _LOCAL.updates = outer


def value(original: Any, variable: Any) -> Any:
    """Hook of Keras's `Variable.value`."""
    updates = current()
    if updates is None and watcher is not None and tf.executing_eagerly():
        watcher.before_read(variable)
    known = None if updates is None else updates.value_of(variable)
    return original(variable) if known is None else private_api.autocast(variable, known)


def direct_assign(original: Any, variable: Any, new: Any) -> Any:
    """Hook of Keras's `Variable._direct_assign`, which every assignment calls."""
    updates = current()
    if updates is None and watcher is not None and tf.executing_eagerly():
        watcher.before_write(variable)
    if updates is None or not updates.assign(variable, tf.cast(new, private_api.raw_variable(variable).dtype)):
        return original(variable, new)
    return None


def own_function_context(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes TensorFlow trace a tf.function that a step calls for this step only, whose values it may hold."""
    context, updates = original(*args, **kwargs), current()
    return context if updates is None else context._replace(context=(context.context, updates))


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


def _can_see(graph: Any) -> bool:
    """Returns whether a value of a graph can be used in the current graph: the same one, or a branch or loop in it.

    A tf.function that the step calls reads variables itself: its trace may run again, after they were written.
    """
    here = _graph()
    while here is not graph and private_api.is_branch_or_loop(here):
        here = here.outer_graph
    return here is graph
