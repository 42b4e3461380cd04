"""Computes a number of a step, such as a loss or a log, for the rows of all replicas.

The mean of the replicas is exact if a number is linear in means over rows. A sum over rows, a quotient of sums, the
root of a mean are computed here again, by the same operations, from the sums and means of the global batch. These are
few and small, so one collective of their numbers is enough.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import rows_again
from tfdistkit.strategies.sync.aggregates.compared_rows import layer_names
from tfdistkit.strategies.sync.aggregates.graph_copies import copied
from tfdistkit.strategies.sync.aggregates.number_kinds import Kind, NumberReader
from tfdistkit.strategies.sync.aggregates.row_reader import can_read, reader_of

# Kinds of which the mean of the replicas is taken.
_MEANS = (Kind.MEAN, Kind.OPAQUE, Kind.LOCAL)
# Kinds that are computed from other numbers.
_COMPUTED = (Kind.OTHER, Kind.COMPARED)
# Kinds that depend on the content of rows, and are known for the global batch; as is the mean.
_OF_CONTENT = (Kind.SUM, Kind.KEPT, Kind.MAX, Kind.MIN, *_COMPUTED)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A number of this replica, that of the global batch, and the weight of the gradient of the first in the second."""

    own: tf.Tensor
    whole: tf.Tensor
    weight: tf.Tensor | float


@dataclasses.dataclass(frozen=True)
class GlobalNumber:
    """A number of the global batch, the same on all replicas.

    Args:
        value: The number.
        leaves: The numbers and rows that it was computed from.
        computed_again: The names of rows of this replica that were computed again, with numbers of the global batch.
    """

    value: tf.Tensor
    leaves: list[_Leaf]
    computed_again: frozenset[str] = frozenset()

    def slopes(self, upstream: Any = None) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns numbers of this replica with their gradients, which sum up to that of the number over all replicas.

        Args:
            upstream: The gradient of the number; None for one.
        """
        floats = [leaf for leaf in self.leaves if leaf.own.dtype.is_floating]
        gradients = tf.gradients(self.value, [leaf.whole for leaf in floats], None if upstream is None else [upstream])
        pairs = zip(floats, gradients)
        return [(leaf.own, slope * tf.cast(leaf.weight, slope.dtype)) for leaf, slope in pairs if slope is not None]


def of_global_batch(
    step: steps.ReplicaStep, number: Any, of_integers: bool = False, of_means: bool = False
) -> GlobalNumber | None:
    """Returns the value for the global batch of a number that a step computed.

    Args:
        step: The step of this replica.
        number: A tensor of the step.
        of_integers: Whether it may be integers, too.
        of_means: Whether it may be a mean over rows, too.

    Returns:
        The number; None if the mean of the replicas is exact, or if the number of the global batch is not known.
    """
    if not _may_read(step, number) or not (number.dtype.is_floating or (of_integers and number.dtype.is_integer)):
        return None
    known = _numbers_of(step)
    key = number.name, of_means
    if key not in known.found:
        reader = known.reader()
        kind = reader.kind(number)
        is_mean = kind is Kind.MEAN or (kind is Kind.OPAQUE and _is_chosen(number))
        is_other = kind not in (Kind.CONSTANT, *_MEANS, Kind.UNKNOWN) or (of_means and is_mean)
        is_other = is_other and number.shape.is_fully_defined()
        found = known.found[key] = _computed(step, reader, number) if is_other else None
        known.values.update(() if found is None else (found.value.name,))
    return known.found[key]


def is_from_rows(step: steps.ReplicaStep, number: Any) -> bool:
    """Returns whether a number is known to be computed from the content of rows, rather than from how many they are.

    Args:
        step: The step of this replica.
        number: A number of the step.
    """
    # The number of rows of a ragged tensor is that of its splits, less one, as if it came from their content.
    is_known = _may_read(step, number) and not step.has_ragged
    return is_known and _numbers_of(step).reader().kind(number) in (Kind.MEAN, *_OF_CONTENT)


def computed_again(step: steps.ReplicaStep, number: Any) -> frozenset[str]:
    """Returns the names of rows behind a number that were computed with numbers of all rows, and are so again."""
    found = of_global_batch(step, number)
    return frozenset() if found is None else found.computed_again


def is_of_global_batch(step: steps.ReplicaStep, tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is a number that was computed here."""
    return tensor.name in _numbers_of(step).values


def note_mean(step: steps.ReplicaStep, value: Any) -> None:
    """Notes that a number is a mean over the rows of a replica, whatever it was computed from: the result of a loss.

    Args:
        step: The step of this replica.
        value: The number.
    """
    if can_read(step, value):
        _numbers_of(step).means.add(value.name)


def are_compared(step: steps.ReplicaStep, rows: Any) -> bool:
    """Returns whether a tensor holds rows that were computed with numbers of the batch, as with their mean."""
    return _may_read(step, rows) and _numbers_of(step).reader().are_compared(rows)


def _is_chosen(number: tf.Tensor) -> bool:
    """Returns whether a number is the result of a branch (`tf.cond`), which is taken for a mean as a whole."""
    while number.op.type == "Identity":
        number = number.op.inputs[0]
    return number.op.type in ("If", "StatelessIf")


def _may_read(step: steps.ReplicaStep, number: Any) -> bool:
    # A static number of rows, of data that the user distributed, cannot be told from another constant.
    has_rows = step.in_keras_step and step.rows is not None and step.held_rows is None
    return has_rows and not step.is_local and can_read(step, number)


class _Numbers:
    """The numbers of a step."""

    def __init__(self, step: steps.ReplicaStep):
        self._step = step
        self._reader: NumberReader | None = None
        self.means: set[str] = set()
        self.found: dict[tuple[str, bool], GlobalNumber | None] = {}
        self.values: set[str] = set()

    def reader(self) -> NumberReader:
        """Returns the reader of their kinds."""
        if self._reader is None:
            layers = layer_names(self._step.model)
            counts_rows = not self._step.has_ragged
            self._reader = NumberReader(reader_of(self._step), self.means, counts_rows, layers)
        return self._reader


def _numbers_of(step: steps.ReplicaStep) -> _Numbers:
    if step.numbers is None:
        step.numbers = _Numbers(step)
    return step.numbers


def _computed(step: steps.ReplicaStep, numbers: NumberReader, number: tf.Tensor) -> GlobalNumber | None:
    order = _behind(numbers, number)
    own = [one for one in order if numbers.kind(one) not in _COMPUTED]
    if not all(one.shape.is_fully_defined() for one in own if numbers.kind(one) is not Kind.CONSTANT):
        return None  # Their sums could not be taken apart.
    leaves = _leaves(step, numbers, own)
    whole = {leaf.own.name: leaf.whole for leaf in leaves}
    again = rows_again.RowsAgain(step, numbers, whole)
    for one in order:
        if one.name in numbers.compared:
            whole[one.name] = again.aggregated(one)
        elif one.name not in whole:
            places = {i: whole[before.name] for i, before in enumerate(one.op.inputs)}
            whole[one.name] = copied(one, places)
    inverse = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), tf.cast(step.share(), tf.float64))
    leaves += [_Leaf(own, rows, inverse) for own, rows in again.ends.values()]
    return GlobalNumber(tf.identity(whole[number.name]), leaves, frozenset(again.rows))


def _behind(numbers: NumberReader, number: tf.Tensor) -> list[tf.Tensor]:
    """Returns a number and those that it was computed from, each after those behind it."""
    order: dict[str, tf.Tensor] = {}
    waiting = [number]
    while waiting:
        one = waiting[-1]
        inputs = list(one.op.inputs) if numbers.kind(one) is Kind.OTHER else []
        inputs += numbers.compared[one.name].numbers if one.name in numbers.compared else []
        missing = [before for before in inputs if before.name not in order]
        if missing and one.name not in order:
            waiting.extend(missing)
        else:
            order.setdefault(one.name, waiting.pop())
    return list(order.values())


def _leaves(step: steps.ReplicaStep, numbers: NumberReader, own: list[tf.Tensor]) -> list[_Leaf]:
    share = tf.cast(step.share(), tf.float64)
    parts: list[tf.Tensor] = []
    for one in own:
        parts.extend(_parts(step, one, numbers.kind(one), share))
    packed = tf.concat([tf.reshape(part, [-1]) for part in parts], 0) if parts else None
    sums = iter([] if packed is None else tf.split(step.sum(packed), [part.shape.num_elements() for part in parts]))
    inverse = tf.math.divide_no_nan(tf.constant(1.0, tf.float64), share)
    leaves = []
    for one in own:
        kind, weight = numbers.kind(one), inverse
        if kind is Kind.CONSTANT:
            leaves.append(_Leaf(one, tf.identity(one) if one.dtype.is_floating else one, 1.0))
            continue
        total = next(sums)
        if kind in _MEANS:
            weight = tf.constant(1.0, tf.float64)
        elif kind is Kind.KEPT:
            count = next(sums)[0]
            total, weight = total / count, tf.math.divide_no_nan(graphs.count_of_mean(one), count) * inverse
        elif kind in (Kind.MAX, Kind.MIN):
            of_replicas = tf.reshape(total, [step.replicas, *one.shape])
            total = (tf.reduce_max if kind is Kind.MAX else tf.reduce_min)(of_replicas, 0)
            ties = tf.reduce_sum(tf.cast(of_replicas == total, tf.float64), 0)
            weight = tf.cast(tf.cast(one, tf.float64) == total, tf.float64) / ties * inverse
        leaves.append(_Leaf(one, tf.cast(tf.reshape(total, one.shape), one.dtype), weight))
    return leaves


def _parts(step: steps.ReplicaStep, one: tf.Tensor, kind: Kind, share: tf.Tensor) -> list[tf.Tensor]:
    """Returns the contribution of this replica to a number of the global batch; zero without rows."""
    if kind is Kind.CONSTANT:
        return []
    value = tf.cast(one, tf.float64)
    if kind in (Kind.MAX, Kind.MIN):
        value = step.if_any_rows(value, -np.inf if kind is Kind.MAX else np.inf)
        is_own = tf.reshape(tf.range(step.replicas) == step.replica_id, [-1, *[1] * one.shape.rank])
        return [tf.where(is_own, value[None], 0)]
    if kind is not Kind.KEPT:
        return [step.if_any_rows(value * share if kind in _MEANS else value)]
    count = step.if_any_rows(graphs.count_of_mean(one))
    return [tf.where(count > 0, value * count, 0), count]
