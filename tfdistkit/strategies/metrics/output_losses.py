"""Weighs the losses of several outputs in the logs as Keras 3.16 does in one process.

The log of such a loss is a mean over the batches so far, which Keras weighs by the rows of the predictions if they are
known when a step is traced. Up to Keras 3.15 they are not, and each batch counts once. From 3.16 on a step is traced
for the first batch: it, and all batches with as many rows, weigh as much as they have rows, and others count once. Our
steps are traced for any number of rows (`step_traces`), so they compute the weight.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import row_counts
from tfdistkit.strategies.sync import step as steps

_LOCAL = threading.local()

# Values in place of the rows of the first batch: no batch so far; every batch counts once.
_UNKNOWN, _NONE = -1.0, 0.0


class BatchWeights:
    """Weights of the batches of the train or test function of a model.

    Args:
        model: The model.
    """

    def __init__(self, model: Any):
        self.model = model
        self._is_for_any_rows = False
        self._by_rows = True
        self._kept = _UNKNOWN
        # The rows of the first global batch; each replica updates a copy of its own.
        self._first: Any = None

    def begin(self, by_rows: bool) -> None:
        """Begins a step.

        Args:
            by_rows: Whether Keras, in one process, would trace it for the rows of the first batch.
        """
        if self._first is None:
            with self.model.distribute_strategy.scope():
                self._first = tf.Variable(_UNKNOWN, trainable=False, name="tfdistkit_first_rows")
        if by_rows == self._by_rows:
            return
        self._by_rows = by_rows
        if by_rows:
            self._first.assign(self._kept)
            return
        # Keras keeps the trace for the first batch; where one for any number of rows is the first, it makes no other.
        kept = float(self._first.numpy())
        self._kept = _NONE if kept == _UNKNOWN else kept
        self._first.assign(_NONE)

    @contextlib.contextmanager
    def for_any_rows(self) -> Iterator[None]:
        """Marks that a step is traced for any number of rows, where Keras would trace it for those of a batch."""
        self._is_for_any_rows = True
        try:
            yield
        finally:
            self._is_for_any_rows = False

    def around(self, step_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns the train or test step of a replica, with the losses of its outputs weighted."""

        @functools.wraps(step_function)
        def step(data: Any) -> Any:
            if not self._is_for_any_rows or self._first is None:
                return step_function(data)
            _LOCAL.weigh = functools.partial(self._weight, data)
            try:
                return step_function(data)
            finally:
                _LOCAL.weigh = None

        return step

    def _weight(self, data: Any, metric: Any) -> tf.Tensor | None:
        """Returns the weight of the loss of this replica's rows; None without rows, or for another loss."""
        if not any(metric is tracker for tracker in private_api.loss_trackers(self.model)):
            return None
        step = steps.current()
        rows = row_counts.count_rows(data)[0] if step is None else step.rows
        if rows is None:
            return None
        total, once = (rows, 1.0) if step is None else (step.total_rows, step.global_share())
        first = tf.convert_to_tensor(self._first)
        first = tf.where(first == _UNKNOWN, total, first)
        self._first.assign(first)
        return tf.where(total == first, rows, tf.cast(once, rows.dtype))


def weighted(metric: Any, kwargs: dict) -> dict:
    """Returns the keyword arguments of an update of a metric, with the weight of the batch for the loss of an output.

    Args:
        metric: The metric.
        kwargs: The arguments. Keras passes None for a weight that is not known when a step is traced.
    """
    weigh, step = getattr(_LOCAL, "weigh", None), steps.current()
    if kwargs.get("sample_weight", 0) is not None:
        return kwargs
    if weigh is None:
        # Keras would know the rows: our steps hide a static number of them.
        is_known = step is not None and step.static_total is not None and step.model is not None and not step.is_eager
        is_ours = is_known and any(metric is tracker for tracker in private_api.loss_trackers(step.model))  # type: ignore
        return {**kwargs, "sample_weight": step.rows} if step is not None and is_ours else kwargs
    return {**kwargs, "sample_weight": weigh(metric)}
