"""Keeps outputs of `predict` that are not one entry per row: a table or a number comes once, not from each replica.

Keras concatenates the outputs of the replicas. What comes from no row is taken from the first replica. A number of the
rows of each replica is refused: one process has another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import local_losses
from tfdistkit.strategies.sync.aggregates.row_reader import can_read, reader_of


def once(step: steps.ReplicaStep, outputs: Any, model: Any) -> Any:
    """Returns the outputs of a replica, on all but the first without those that come from no row.

    Args:
        step: The step of this replica, in `predict`.
        outputs: Any structure of tensors.
        model: The model that predicts.

    Returns:
        The structure. Numbers without a dimension stay, for `concatenated`.

    Raises:
        UnsupportedError: if an output is computed from all rows of the replica, as a mean over them is.
    """
    step.model = model
    if type(model).predict_step is not keras.Model.predict_step:
        local_losses.warn_of_numbers(step, tf.nest.flatten(outputs), "An output of `predict_step`")
    return _mapped(lambda value, name: _once(step, value, name), outputs, "")


def concatenated(concatenate: Callable[[Any], Any], strategy: Any, values: Any) -> Any:
    """Puts the outputs of all replicas one after the other; numbers without a dimension are those of the first one.

    Args:
        concatenate: Does so with an output of all replicas that has a dimension.
        strategy: The strategy.
        values: The outputs of all replicas, any structure of them.
    """

    has_one_here = strategy.num_replicas_in_sync > len(strategy.extended.worker_devices) == 1

    def of_all(value: Any) -> Any:
        local = strategy.experimental_local_results(value)[0]
        if has_one_here and isinstance(local, tf.RaggedTensor):  # Keras gathers dense tensors.
            return tf.RaggedTensor.from_row_lengths(of_all(local.values), concatenate(local.row_lengths()))
        return local if tf.is_tensor(local) and local.shape.rank == 0 else concatenate(value)

    return keras.tree.map_structure(of_all, values)


def _mapped(function: Any, outputs: Any, name: str) -> Any:
    if isinstance(outputs, dict):
        return type(outputs)({key: _mapped(function, one, f"{name}[{key!r}]") for key, one in outputs.items()})
    if type(outputs) in (list, tuple):
        return type(outputs)(_mapped(function, one, f"{name}[{i}]") for i, one in enumerate(outputs))
    return function(outputs, name)


def _once(step: steps.ReplicaStep, value: Any, name: str) -> Any:
    if not isinstance(value, tf.Tensor) or value.shape.rank is None:
        return value
    if not can_read(step, value):
        if value.shape.rank == 0:
            raise _not_of_rows(step, value, name)
        return value
    reader = reader_of(step)
    if not reader.comes_from_batch(value):
        return value if value.shape.rank == 0 or not step.replica_id else value[:0]
    if value.shape.rank == 0 or (value.shape[0] is not None and step.held_rows is None and not reader.has_rows(value)):
        raise _not_of_rows(step, value, name)
    return value


def _not_of_rows(step: steps.ReplicaStep, value: tf.Tensor, name: str) -> UnsupportedError:
    return UnsupportedError(
        explain(
            f"Outputs of `predict` on {step.replicas} replicas must have an entry for each row: each replica has some "
            "of the rows, and their outputs are put one after the other.",
            received=f"the output{name}, of the shape {value.shape}",
            expected="the number of rows as the first dimension, or a value that comes from no row",
            do="Return what each row adds, and reduce what `predict` returns; or predict by a model of one process, "
            "outside of the strategy.",
        )
    )
