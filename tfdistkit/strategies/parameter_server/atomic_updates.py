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
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api

_LOCAL = threading.local()

# Called before the program itself writes a variable while steps of `fit` or `evaluate` are in flight: a learning rate
# that a callback sets after each batch. None where no steps are in flight.
before_write: Callable[[], None] | None = None


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
            return False
        graph, read = self._known.get(id(variable), (None, None))
        here = _graph()
        collects = id(variable) in self._collected_ids
        if not collects or here is not self._graph:
            if read is None or not _can_see(graph):
                return False  # The value was not computed from one that was read here: there is no difference to add.
            private_api.raw_variable(variable).assign_add(value - read)
        # A value of a branch cannot be collected outside of it, and was written to the variable.
        if not collects or here is self._graph:
            self._known[id(variable)] = (here, value)
        return True

    def sums(self) -> list[tf.Tensor]:
        """Returns the sums of the collected variables, in their order."""
        return [self._known[id(v)][1] for v in self.collected]

    def _holds(self, variable: Any) -> bool:
        if id(variable) in self._collected_ids:
            return True
        if variable.trainable or private_api.raw_variable(variable) is None:
            return False
        dtype = tf.as_dtype(private_api.raw_variable(variable).dtype)
        # Slots of optimizers are neither summed nor integers; Keras writes them with atomic operations.
        return dtype.is_integer or (dtype.is_floating and variable.aggregation in ("sum", "mean"))


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
    known = None if updates is None else updates.value_of(variable)
    return original(variable) if known is None else private_api.autocast(variable, known)


def direct_assign(original: Any, variable: Any, new: Any) -> Any:
    """Hook of Keras's `Variable._direct_assign`, which every assignment calls."""
    updates = current()
    if updates is None and before_write is not None and tf.executing_eagerly():
        before_write()
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
