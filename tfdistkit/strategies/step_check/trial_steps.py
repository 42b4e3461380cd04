"""Runs a train step on trial: computes its gradients and its writes to variables, without writing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.metrics.metric_sync import agree
from tfdistkit.strategies.step_check.fixed_operations import fixed, require_any_rows, require_fixed
from tfdistkit.strategies.step_check.small_batch import of_any_rows
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.gradients import trial

# A gradient is compared by a few numbers: its products with these waves, frequency and phase; the last is its norm.
_WAVES = ((12.9898, 0.3), (78.233, 1.1), (37.719, 2.2))
# Entries of a sparse gradient's table, at most; a larger one is not compared.
_MOST_ENTRIES = 10_000_000


class TrialStep:
    """A train step of a model, on trial.

    Args:
        strategy: The strategy of the model.
        model: The model.
        step_function: Its train step.
        is_stock: Whether it is Keras's own.
        elements: The element of each replica of this process; those of a run may have other numbers of rows.

    Attributes:
        variables: The variables with gradients, in the order of `optimizer.apply`.
        written: The variables that the step writes by itself, in the order of the step.
        logged: The names of the numbers in its logs.

    Raises:
        trial.CannotTryError: if a trial would compute something else than the step.
    """

    def __init__(
        self, strategy: Any, model: Any, step_function: Callable[[Any], Any], is_stock: bool, elements: list[Any]
    ):
        self._strategy, self._model = strategy, model
        self._step_function, self._is_stock = step_function, is_stock
        self._of_replicas: list[tuple[list[Any], list[Any], list[str]]] = []
        self._run = _without_writes(self._traced, elements)
        self.variables, self.written, self.logged = self._of_replicas[0]

    def run(self, elements: list[Any]) -> list[np.ndarray]:
        """Runs the step, together on all ranks.

        Args:
            elements: The element of each replica of this process.

        Returns:
            For each of `variables`, the numbers of its gradient, summed over the replicas; the last is a norm, which is
            that of the gradient where one replica has all rows. And the same of what each of `written` gets, and of
            `logged`.
        """
        return np.split(np.asarray(self._run(elements)[0]), np.cumsum([len(self.variables), len(self.written)]))

    def _traced(self, elements: list[Any]) -> list[Any]:
        sums = self._strategy.run(self._in_replica, args=(private_api.regroup(elements),))
        return list(self._strategy.experimental_local_results(sums))

    @tf.autograph.experimental.do_not_convert
    def _in_replica(self, data: Any) -> Any:
        step = steps.current()
        assert step is not None
        step.model = self._model
        data = step.begin_keras_step(data, self._is_stock)
        with trial.recording() as recorded:
            logs = agree(step, self._step_function(data))
        graph = tf.compat.v1.get_default_graph()
        if any(part.graph is not graph for _, part in recorded.gradients):
            raise trial.CannotTryError("it applies gradients in a branch or a loop")
        gradients = [(variable, part) for variable, part in recorded.gradients if _is_comparable(variable, part)]
        if not gradients:
            raise trial.CannotTryError("it applies no gradients by an optimizer of Keras")
        writes = [(variable, value) for variable, value in recorded.writes if value.graph is graph]
        logged = [(path, value) for path, value in keras.tree.flatten_with_path(logs) if _is_number(value)]
        names = ["/".join(map(str, path)) for path, _ in logged]
        self._of_replicas.append(([variable for variable, _ in gradients], [variable for variable, _ in writes], names))
        # Means over the replicas: those of numbers that are equal on all are these numbers.
        own = [tf.cast(value, tf.float64) * step.share() for _, value in (*writes, *logged)]
        numbers = [_numbers_of(variable, part) for variable, part in gradients]
        numbers += [_numbers_of(None, value) for value in step.without_empty(own)]
        return step.sum_of_all(tf.stack(numbers))


def _is_comparable(variable: Any, part: Any) -> bool:
    is_large = isinstance(part, tf.IndexedSlices) and np.prod(variable.shape) > _MOST_ENTRIES
    return bool(part.dtype.is_floating and not is_large)


def _is_number(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank == 0 and value.dtype.is_floating


def _numbers_of(variable: Any, part: Any) -> tf.Tensor:
    if isinstance(part, tf.IndexedSlices):
        part = tf.math.unsorted_segment_sum(part.values, part.indices, variable.shape[0])
    flat = tf.cast(tf.reshape(part, [-1]), tf.float64)
    places = tf.cast(tf.range(tf.size(flat)), tf.float64)
    products = [tf.reduce_sum(flat * tf.sin(places * frequency + phase)) for frequency, phase in _WAVES]
    return tf.stack([*products, tf.norm(flat)])


def _without_writes(function: Callable[[Any], list[Any]], like: Any) -> Callable[[Any], list[Any]]:
    """Traces a function without its writes to variables.

    Args:
        function: Takes a structure of tensors.
        like: Such a structure; others may have another number of rows.
    """
    structure, flat = tf.nest.map_structure(of_any_rows, like), tf.nest.flatten(like, expand_composites=True)

    def traced(*given: Any) -> list[Any]:
        values = iter(given)
        filled = [next(values) if tf.is_tensor(value) else value for value in flat]
        with fixed(tf.compat.v1.get_default_graph()), tf.variable_creator_scope(_refuse_variable), trial.tracing():
            return function(tf.nest.pack_sequence_as(structure, filled, expand_composites=True))

    signature = [tf.TensorSpec(_any_rows(value), value.dtype) for value in flat if tf.is_tensor(value)]
    # Unlike a tf.function it runs only what its results need, and orders nothing.
    wrapped = tf.compat.v1.wrap_function(tf.autograph.experimental.do_not_convert(traced), signature)
    require_fixed(wrapped.graph)
    require_any_rows(wrapped.graph)

    def run(data: Any) -> list[Any]:
        tensors = [value for value in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(value)]
        return list(wrapped(*tensors))

    return run


def _any_rows(value: Any) -> list[int | None]:
    if not value.shape.rank:
        return []
    others = value.shape[1:] if value.shape[0] else [None] * (value.shape.rank - 1)  # `KerasPart.total_in_shape`
    return [None, *(size or None for size in others)]


def _refuse_variable(next_creator: Any, **kwargs: Any) -> Any:
    raise trial.CannotTryError("it makes variables in its first step")
