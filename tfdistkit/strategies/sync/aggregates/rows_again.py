"""Recomputes rows with aggregates of the global batch, and sums, means and extremes over them, with gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.strategies.sync import data_dependence as graphs
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates.compared_rows import added_up
from tfdistkit.strategies.sync.aggregates.graph_copies import copied
from tfdistkit.strategies.sync.aggregates.number_kinds import Kind, NumberReader


class RowsAgain:
    """Recomputes rows of this replica with the numbers of the global batch.

    Args:
        step: The step of this replica.
        numbers: The reader of its numbers.
        whole: Maps the name of a number to its value for the global batch; read when it is needed.
    """

    def __init__(self, step: steps.ReplicaStep, numbers: NumberReader, whole: dict[str, tf.Tensor]):
        self._step, self._numbers, self._whole = step, numbers, whole
        self._spread: dict[str, tf.Tensor] = {}
        # Maps the name of rows to the recomputed rows.
        self.rows: dict[str, tf.Tensor] = {}
        # Maps the name of unchanged rows that are inputs of recomputed rows to these rows and the copy in use.
        self.ends: dict[str, tuple[tf.Tensor, tf.Tensor]] = {}

    def aggregated(self, aggregate: tf.Tensor) -> tf.Tensor:
        """Returns a sum, a mean or an extreme over the recomputed rows of all replicas."""
        for one in self._numbers.compared[aggregate.name].rows:
            if one.name not in self.rows:
                self.rows[one.name] = copied(one, self._places(one.op))
        product = added_up(aggregate)
        own = copied(product, self._places(product.op))
        own = own if product is aggregate else copied(aggregate, {0: own})
        kind, value = self._numbers.aggregate(aggregate), tf.cast(own, tf.float64)
        if kind in (Kind.MAX, Kind.MIN):
            total = self._extreme(value, kind)
        elif kind is Kind.KEPT:
            count = self._step.if_any_rows(graphs.count_of_mean(own))
            total = self._sum(tf.where(count > 0, value * count, 0)) / self._step.sum(count)
        elif kind in (Kind.MEAN, Kind.LOCAL) and aggregate.op.type == "Mean":
            total = self._sum(value * tf.cast(self._step.share(), tf.float64))
        else:
            total = self._sum(value)
        total = tf.cast(total, aggregate.dtype)
        total.set_shape(aggregate.shape)
        return total

    def _places(self, operation: Any) -> dict[int, tf.Tensor]:
        """Returns the replacements for the inputs of a repeated operation, by position."""
        numbers = {one.name for one in self._numbers.numbers_of(operation)}
        places = {}
        for i, one in enumerate(operation.inputs):
            if one.name in self.rows:
                places[i] = self.rows[one.name]
            elif one.name in numbers:
                places[i] = self._used_by_rows(one)
            elif one.dtype.is_floating and self._numbers.has_rows(one):
                places[i] = self.ends.setdefault(one.name, (one, tf.identity(one)))[1]
        return places

    def _used_by_rows(self, number: tf.Tensor) -> tf.Tensor:
        """Returns a number of the global batch, with the gradient from the rows of all replicas."""
        if number.name not in self._spread:
            self._spread[number.name] = self._with_sum_of_gradients(self._whole[number.name])
        return self._spread[number.name]

    def _with_sum_of_gradients(self, number: tf.Tensor) -> tf.Tensor:
        if not number.dtype.is_floating:
            return number
        step = self._step

        @tf.custom_gradient
        def forward(value: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                return tf.cast(step.sum(step.if_any_rows(tf.cast(upstream, tf.float64))), upstream.dtype)

            return tf.identity(value), gradient

        return forward(number)

    def _sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a sum over the replicas; passes its gradient to each part, because all compute the same from it."""
        step = self._step

        @tf.custom_gradient
        def forward(own: tf.Tensor) -> Any:
            return step.sum(step.if_any_rows(own)), lambda upstream: upstream

        return forward(value)

    def _extreme(self, value: tf.Tensor, kind: Kind) -> tf.Tensor:
        step = self._step
        value = step.if_any_rows(value, -np.inf if kind is Kind.MAX else np.inf)
        is_own = tf.reshape(tf.range(step.replicas) == step.replica_id, [-1, *[1] * value.shape.rank])
        of_replicas = self._sum(tf.where(is_own, value[None], 0))
        return (tf.reduce_max if kind is Kind.MAX else tf.reduce_min)(of_replicas, 0)
