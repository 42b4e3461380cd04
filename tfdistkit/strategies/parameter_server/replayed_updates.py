"""Records metric updates on the workers of a parameter-server job; the coordinator replays them in batch order.

A worker's step has one batch, and steps end in any order. The coordinator can add up sums over rows; a metric that may
not be additive must be updated with one batch after the other, as in one process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdistkit.keras_adapter import private_api

_LOCAL = threading.local()


class Update(NamedTuple):
    """One call of `update_state`.

    Args:
        metric: The metric.
        structure: Its arguments, `(args, kwargs)`.
        leaves: The leaves of the structure, with placeholders for tensors.
        counts: How many tensors are sent for each leaf.
    """

    metric: Any
    structure: Any
    leaves: list[Any]
    counts: list[int]


class Records:
    """Collects the updates of one step."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.tensors: list[tf.Tensor] = []

    def add(self, metric: Any, args: tuple, kwargs: dict) -> None:
        """Records a call of `update_state` while a step is traced."""
        structure = (args, kwargs)
        leaves = [private_api.as_dense_tensor(v) for v in tf.nest.flatten(structure)]
        parts = [tensors_of(v) for v in leaves]
        self.tensors += [t for part in parts for t in part]
        kept = [known_value(v) if tf.is_tensor(v) and not part else _placeholder(v) for v, part in zip(leaves, parts)]
        self.updates.append(Update(metric, tf.nest.map_structure(lambda _: 0, structure), kept, [*map(len, parts)]))


class Replayed:
    """Replays recorded updates on the state of metrics, in this process.

    Args:
        updates: The updates of a step.
    """

    def __init__(self, updates: list[Update]):
        self._updates = updates
        metrics = {id(u.metric): u.metric for u in updates}.values()
        self.variables = list({id(v): v for m in metrics for v in m.variables}.values())
        self._state: list[tf.Tensor] | None = None
        self._run = tf.function(self._updated, reduce_retracing=True, autograph=False)

    def forget(self) -> None:
        """Reads the state from the variables again at the next use."""
        self._state = None

    def state(self) -> list[tf.Tensor]:
        """Returns the current state."""
        if self._state is None:
            self._state = [tf.identity(tf.convert_to_tensor(private_api.raw_variable(v))) for v in self.variables]
        return self._state

    def replay(self, tensors: list[tf.Tensor]) -> None:
        """Runs the updates of a step, one batch after the other.

        Args:
            tensors: The tensors that were sent for them.
        """
        size = sum(sum(u.counts) for u in self._updates)
        with tf.device("CPU:0"):
            for first in range(0, len(tensors), max(size, 1)):
                self._state = self._run(self.state(), tensors[first : first + size])

    def store(self) -> None:
        """Writes the state to the variables."""
        if self._state is not None:
            for variable, value in zip(self.variables, self._state):
                private_api.raw_variable(variable).assign(value)

    def _updated(self, state: list[tf.Tensor], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        with keras.StatelessScope(state_mapping=list(zip(self.variables, state))) as scope:
            rest = list(tensors)
            for update in self._updates:
                leaves = []
                for leaf, count in zip(update.leaves, update.counts):
                    own, rest = rest[:count], rest[count:]
                    leaves.append(with_tensors(leaf, own))
                args, kwargs = tf.nest.pack_sequence_as(update.structure, leaves)
                update.metric.update_state(*args, **kwargs)
        return [tf.convert_to_tensor(scope.get_current_value(v)) for v in self.variables]


def current() -> Records | None:
    """Returns the records of the step that this thread traces; None outside of a step."""
    return getattr(_LOCAL, "records", None)


@contextlib.contextmanager
def recording() -> Iterator[Records]:
    """Records the updates of metrics that may not be additive in this thread, instead of running them."""
    before, records = current(), Records()
    _LOCAL.records = records
    try:
        yield records
    finally:
        _LOCAL.records = before


def known_value(value: Any) -> Any:
    """Returns a value that is known before a step runs, and so does not depend on its rows; else None."""
    if isinstance(value, (tf.Variable, keras.Variable)) or tf.executing_eagerly() and tf.is_tensor(value):
        return None
    return tf.get_static_value(value) if tf.is_tensor(value) else value


def tensors_of(value: Any) -> list[tf.Tensor]:
    """Returns the tensors to send for a value: itself, the parts of a ragged tensor, and Keras's mask."""
    if isinstance(value, tf.RaggedTensor):
        return [value.flat_values, *value.nested_row_lengths()]
    if not isinstance(value, tf.Tensor) or value.shape.rank == 0 and known_value(value) is not None:
        return []
    mask = private_api.mask_of(value)
    return [value] if mask is None else [value, mask]


def with_tensors(value: Any, tensors: list[tf.Tensor]) -> Any:
    """Returns a value made from the tensors that were sent for it (`tensors_of`)."""
    if isinstance(value, tf.RaggedTensor) or value is tf.RaggedTensor:
        return tf.RaggedTensor.from_nested_row_lengths(tensors[0], tensors[1:], validate=False)
    if len(tensors) == 2:
        private_api.set_mask(tensors[0], tensors[1])
    return tensors[0] if tensors else value


def _placeholder(value: Any) -> Any:
    """Returns the placeholder of a value whose tensors are sent."""
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor
    return None if tf.is_tensor(value) else value
