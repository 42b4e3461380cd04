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
from tfdistkit.strategies.step_check.local_part import local_part
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
        branch: The branch that all conditions of the user's take (`tf.cond`, AutoGraph's `if`); None for the one that
            the rows choose.

    Attributes:
        has_branches: Whether there are such conditions.
        variables: The variables with gradients, in the order of `optimizer.apply`.
        written: The variables that the step writes by itself, in the order of the step.
        logged: The names of what it logs, and of the variables of metrics that it adds to.

    Raises:
        trial.CannotTryError: if a trial would compute something else than the step.
    """

    def __init__(
        self,
        strategy: Any,
        model: Any,
        step_function: Callable[[Any], Any],
        is_stock: bool,
        elements: list[Any],
        branch: bool | None = None,
    ):
        self._strategy, self._model = strategy, model
        self._step_function, self._is_stock = step_function, is_stock
        self._of_replicas: list[tuple[list[Any], list[Any], list[str]]] = []
        self._run = _without_writes(self._traced, elements, branch)
        self.has_branches = trial.has_branches()
        self._local_part: Any = None
        self.variables, self.written, self.logged = self._of_replicas[0]

    def run_local_part(self, elements: list[Any]) -> None:
        """Runs what the step computes without the other processes.

        Args:
            elements: The element of each replica of this process.

        Raises:
            tf.errors.OpError: if that fails.
        """
        tensors = _tensors(elements)
        if self._local_part is None:
            self._local_part = local_part(self._run, len(tensors)) or (lambda *_: None)
        self._local_part(*tensors)

    def run(self, elements: list[Any]) -> list[np.ndarray]:
        """Runs the step, together on all ranks.

        Args:
            elements: The element of each replica of this process.

        Returns:
            For each of `variables`, the numbers of its gradient, summed over the replicas; the last but one is a norm,
            which is that of the gradient where one replica has all rows. The same for the change of each of `written`,
            whose last number is the norm of the new value, and for each of `logged`.
        """
        numbers = np.asarray(self._run(*_tensors(elements))[0])
        return np.split(numbers, np.cumsum([len(self.variables), len(self.written)]))

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
        numbers = [_numbers_of(part, variable=variable) for variable, part in gradients]
        writes = [one for one in recorded.writes if one.change.graph is graph]
        if not gradients and not writes:
            raise trial.CannotTryError("it applies no gradients by an optimizer of Keras")
        sums = [one for one in writes if one.merged is trial.Merged.SUM]
        writes = [one for one in writes if one.merged is not trial.Merged.SUM]
        logged = [(path, value) for path, value in keras.tree.flatten_with_path(logs) if _is_numeric(value)]
        names = ["/".join(map(str, path)) for path, _ in logged] + [name_of(one.variable) for one in sums]
        self._of_replicas.append(([variable for variable, _ in gradients], [one.variable for one in writes], names))
        for one in writes:
            numbers.append(_numbers_of(*_parts(step, one.merged, one.change, one.value)))
        for _, value in logged:
            numbers.append(_numbers_of(*_parts(step, trial.Merged.MEAN, value)))
        for one in sums:
            numbers.append(_numbers_of(*_parts(step, one.merged, one.change)))
        return step.sum_of_all(tf.stack(numbers))


def _parts(step: steps.ReplicaStep, merged: trial.Merged, *values: tf.Tensor) -> list[tf.Tensor]:
    """Returns this replica's summands of values that are merged over the replicas.

    The mean of numbers that are equal on all replicas are these numbers.
    """
    is_first = float(step.replica_id == 0)
    factor = {trial.Merged.MEAN: step.share(), trial.Merged.SUM: 1.0, trial.Merged.FIRST: is_first}[merged]
    parts = [tf.cast(value, tf.float64) * factor for value in values]
    return parts if merged is trial.Merged.FIRST else step.without_empty(parts)


def name_of(variable: Any) -> str:
    """Returns the name of a variable of Keras or TensorFlow as users know it."""
    return str(getattr(variable, "path", None) or variable.name.removesuffix(":0"))


def _is_comparable(variable: Any, part: Any) -> bool:
    is_large = isinstance(part, tf.IndexedSlices) and np.prod(variable.shape) > _MOST_ENTRIES
    return bool(part.dtype.is_floating and not is_large)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_integer)


def _numbers_of(part: Any, value: Any = None, variable: Any = None) -> tf.Tensor:
    if isinstance(part, tf.IndexedSlices):
        part = tf.math.unsorted_segment_sum(part.values, part.indices, variable.shape[0])
    flat = tf.cast(tf.reshape(part, [-1]), tf.float64)
    places = tf.cast(tf.range(tf.size(flat)), tf.float64)
    products = [tf.reduce_sum(flat * tf.sin(places * frequency + phase)) for frequency, phase in _WAVES]
    of_value = tf.zeros([], tf.float64) if value is None else tf.norm(value)
    return tf.stack([*products, tf.norm(flat), of_value])


def _tensors(data: Any) -> list[tf.Tensor]:
    return [value for value in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(value)]


def _without_writes(function: Callable[[Any], list[Any]], like: Any, branch: bool | None) -> Any:
    """Traces a function without its writes to variables.

    Args:
        function: Takes a structure of tensors.
        like: Such a structure; others may have another number of rows.
        branch: See `TrialStep`.

    Returns:
        What `tf.compat.v1.wrap_function` returned; it takes the tensors of a structure.
    """
    structure, flat = tf.nest.map_structure(of_any_rows, like), tf.nest.flatten(like, expand_composites=True)

    def traced(*given: Any) -> list[Any]:
        values = iter(given)
        filled = [next(values) if tf.is_tensor(value) else value for value in flat]
        graph = tf.compat.v1.get_default_graph()
        with fixed(graph), tf.variable_creator_scope(_refuse_variable), trial.tracing(branch):
            return function(tf.nest.pack_sequence_as(structure, filled, expand_composites=True))

    signature = [tf.TensorSpec(_any_rows(value), value.dtype) for value in flat if tf.is_tensor(value)]
    # Unlike a tf.function it runs only what its results need, and orders nothing.
    wrapped = tf.compat.v1.wrap_function(tf.autograph.experimental.do_not_convert(traced), signature)
    require_fixed(wrapped.graph)
    require_any_rows(wrapped.graph)
    return wrapped


def _any_rows(value: Any) -> list[int | None]:
    if not value.shape.rank:
        return []
    others = value.shape[1:] if value.shape[0] else [None] * (value.shape.rank - 1)  # `KerasPart.total_in_shape`
    return [None, *(size or None for size in others)]


def _refuse_variable(next_creator: Any, **kwargs: Any) -> Any:
    raise trial.CannotTryError("it makes variables in its first step")
