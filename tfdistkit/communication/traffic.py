"""Counts the bytes that a worker sends in the training steps of a model."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfdistkit.communication.reducer import Wire


class Sent(NamedTuple):
    """The traffic since `reset`.

    Args:
        steps: The number of steps.
        size_bytes: The bytes that this worker sent.
        exact_bytes: The bytes that it would have sent with uncompressed gradients in every step.
        syncs: How often gradients or weights were sent.
    """

    steps: float
    size_bytes: float
    exact_bytes: float
    syncs: float

    @property
    def ratio(self) -> float:
        """The ratio of the bytes to those of uncompressed gradients; 1 if nothing was to be sent."""
        return self.size_bytes / self.exact_bytes if self.exact_bytes else 1.0


class Traffic:
    """Adds up the bytes of collectives at run time, so that branches and loops of a graph count correctly.

    The bytes are those that each of N workers sends in a ring: twice `(N - 1) / N` of the size for a sum, and `N - 1`
    times its own tensor for a gather. Sparse gradients count with the rows of this worker. Headers and padding of the
    transport are not counted.

    Args:
        workers: The number of workers; one sends nothing.
    """

    def __init__(self, workers: int):
        self._workers = workers
        self._is_counting = False
        # The places where a sync has been counted: a step may send several tensors.
        self._places: weakref.WeakSet[Any] = weakref.WeakSet()
        with tf.device("CPU:0"), tf.init_scope():
            # float64 has no dtype of the model: it may be float16.
            self._steps, self._sent, self._exact, self._syncs = (
                tf.Variable(0.0, trainable=False, dtype=tf.float64, name="tfdistkit_traffic") for _ in range(4)
            )

    def reset(self) -> None:
        """Begins an epoch."""
        for variable in (self._steps, self._sent, self._exact, self._syncs):
            variable.assign(0.0)

    def sent(self) -> Sent:
        """Returns what was sent since `reset`."""
        return Sent(*(float(one.numpy()) for one in (self._steps, self._sent, self._exact, self._syncs)))

    def count_step(self) -> None:
        """Counts a training step."""
        self._steps.assign_add(1.0)

    def count_exact(self, gradients: list[Any]) -> None:
        """Counts the bytes of an uncompressed sum of gradients.

        Args:
            gradients: Tensors or IndexedSlices.
        """
        if self._workers > 1:
            self._add(self._exact, self._of_sum(gradients))

    def count_others(self, tensors: list[Any]) -> None:
        """Counts a sum that is not one of gradients, such as that of logs, unless a wire runs it.

        Args:
            tensors: Tensors or IndexedSlices.
        """
        if not self._is_counting and self._workers > 1:
            size = self._of_sum(tensors)
            self._add(self._sent, size)
            self._add(self._exact, size)

    def counted(self, wire: Wire, place: Any, is_sync: bool = True) -> Wire:
        """Makes a wire count the bytes that it sends; for a wire that knows hosts, the bytes between hosts.

        Args:
            wire: A new wire, which is changed.
            place: The key of an eager step, in which a sync counts once; None to count each.
            is_sync: Whether it sends gradients or weights.
        """
        if self._workers == 1:
            return wire
        across = wire.across_hosts
        wire.across_hosts = lambda: self._counted_over_hosts(across(), place)  # type: ignore[method-assign]
        own, others = (self._workers - 1) / self._workers, self._workers - 1
        sizes: dict[str, Callable[[Any], Any]] = {
            "sum": self._of_sum,
            "adasum": self._of_sum,
            "gather": lambda tensor: others * _size_of(tensor),
            "exchange": lambda rows: own * _size_of(rows),
        }
        for name, size in sizes.items():
            setattr(wire, name, functools.partial(self._call, getattr(wire, name), size, place, is_sync))
        return wire

    def _counted_over_hosts(self, wire: Wire, place: Any) -> Wire:
        of_sum = functools.partial(self._of_sum, workers=wire.replicas)
        wire.sum = functools.partial(self._call, wire.sum, of_sum, place, True)  # type: ignore[method-assign]
        return wire

    def _call(
        self,
        send: Callable[..., Any],
        size: Callable[[Any], Any],
        place: Any,
        is_sync: bool,
        what: Any,
        *more: Any,
        **named: Any,
    ) -> Any:
        if isinstance(what, list) and not what:
            return send(what, *more, **named)
        if not self._is_counting:  # A wire may implement one collective by another.
            self._add(self._sent, size(what))
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            here = place if graph is None else graph
            if is_sync and (here is None or here not in self._places):
                self._syncs.assign_add(1.0)
            if here is not None:
                self._places.add(here)
        with self._counting():
            return send(what, *more, **named)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        before, self._is_counting = self._is_counting, True
        try:
            yield
        finally:
            self._is_counting = before

    def _of_sum(self, tensors: list[Any], workers: int = 0) -> Any:
        others, workers = (workers or self._workers) - 1, workers or self._workers
        parts = [others * _size_of(one) if isinstance(one, tf.IndexedSlices)
                 else 2 * others / workers * _size_of(one) for one in tensors]  # fmt: skip
        return sum(parts)

    def _add(self, variable: tf.Variable, size: Any) -> None:
        variable.assign_add(tf.cast(size, tf.float64))


def _size_of(tensor: Any) -> Any:
    """Returns the bytes of a tensor or IndexedSlices: a number where the shape is known while tracing."""
    if isinstance(tensor, tf.IndexedSlices):
        return _size_of(tensor.values) + _size_of(tensor.indices)
    shape, size = tf.TensorShape(tensor.shape), tf.as_dtype(tensor.dtype).size
    if shape.is_fully_defined():
        return float(shape.num_elements() * size)
    return tf.cast(tf.size(tensor), tf.float64) * float(size)
