"""The logs of local steps: each replica's own after a step, those of all replicas at the end of an epoch.

At the end of an epoch Keras reads its metrics, whose state TensorFlow sums over the replicas. Logs of a `train_step` of
the user's own that are not results of all metrics are merged here, so that callbacks decide alike on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.metrics.gathered_rows import gather_rows, has_rows
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.data_dependence import comes_from_batch


class _Leaf(NamedTuple):
    """The kind of a value in the logs.

    Args:
        kind: "result" of a metric, "mean" (a float), "count" (an integer computed from rows), "first" (another one),
            "rows", or "" for a value that is not a number.
        metric: The metric of a result.
        position: The position of the value in the metric's results.
    """

    kind: str
    metric: Any = None
    position: int = 0


class NeedsMergedResults(Exception):
    """Signals that a step whose logs are computed from results of metrics must be traced again."""


class LocalLogs:
    """The logs of a model's local steps.

    A log that a train step computes from the result of a metric (`100 * metric.result()`) cannot be merged at the end
    of an epoch. In such a step results are those of all replicas, which costs a collective in each; an eager step of
    the user's own does not tell, so it counts as one.

    Args:
        strategy: The strategy of the model.
    """

    def __init__(self, strategy: Any):
        self._strategy = strategy
        with strategy.scope():
            self._rows = tf.Variable(0.0, trainable=False, name="tfdistkit_rows")
        self._leaves: list[_Leaf] = []
        self._merges_results = False
        # The logs that Keras received last. Merged logs, such as those of `evaluate`, are other objects.
        self.last: Any = None

    def begin_step(self, step: steps.ReplicaStep) -> None:
        """Begins a local step in a replica.

        Args:
            step: The step.
        """
        step.merges_results = self._merges_results or (step.is_eager and not step.in_stock_train_step)

    def end_step(self, step: steps.ReplicaStep, logs: Any) -> Any:
        """Ends a local step in a replica.

        Args:
            step: The step.
            logs: What the train step returned.

        Returns:
            The logs, in dense tensors.

        Raises:
            NeedsMergedResults: the first time that a graph computes logs from results of metrics.
        """
        values = [private_api.as_dense_tensor(v) for v in tf.nest.flatten(logs)]
        self._leaves = [_leaf(step, value) for value in values]
        others = [value for value, one in zip(values, self._leaves) if one.kind not in ("result", "")]
        if not step.merges_results and not step.is_eager and _depend(others, [one[0] for one in step.results.values()]):
            self._merges_results = True
            raise NeedsMergedResults
        if others:
            self._rows.assign(1.0 if step.rows is None else step.rows)
        return tf.nest.pack_sequence_as(logs, values)

    def traced(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a train function that traces its step again if necessary, and notes its logs.

        Args:
            function: A train function of local steps.
        """

        def noting(iterator: Any) -> Any:
            merged = self._merges_results
            if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                iterator = list(iterator)  # The batch of `train_on_batch`, for a second call.
            try:
                self.last = function(iterator)
            except Exception:
                # TensorFlow may have replaced the exception. Nothing of the step has run, and no data was read.
                if merged or not self._merges_results:
                    raise
                self.last = function(iterator)
            return self.last

        return noting

    def merged(self, logs: Any) -> Any:
        """Returns the logs of the last step over all replicas; all ranks call it at the end of an epoch.

        Args:
            logs: Those of this replica.

        Returns:
            Results of metrics over all rows of the epoch; other floats as their mean weighted by the rows of the last
            step; counts as their sum; rows of all replicas; of other integers those of replica 0.
        """
        values = tf.nest.flatten(logs)
        if len(values) != len(self._leaves):
            return logs
        own = {i: values[i] for i, one in enumerate(self._leaves) if one.kind not in ("result", "")}
        of_all = dict(zip(own, self._strategy.run(self._sum, args=(list(own.values()), list(own))))) if own else {}
        for i, one in enumerate(self._leaves):
            if one.kind == "result":
                of_all[i] = tf.nest.flatten(one.metric().result())[one.position]
        return tf.nest.pack_sequence_as(logs, [of_all.get(i, value) for i, value in enumerate(values)])

    @tf.autograph.experimental.do_not_convert
    def _sum(self, values: list[Any], numbers: list[int]) -> list[Any]:
        context = tf.distribute.get_replica_context()
        rows, replicas = tf.convert_to_tensor(self._rows), context.num_replicas_in_sync
        step = steps.ReplicaStep(rows, lambda own: own.sum_of_all(rows), replicas, private_api.replica_id(context))
        with steps.running(step):
            return [self._summed(step, value, self._leaves[i].kind) for value, i in zip(values, numbers)]

    def _summed(self, step: steps.ReplicaStep, value: Any, kind: str) -> Any:
        value = tf.convert_to_tensor(value)
        if kind == "rows":
            return gather_rows(step, [value])[0]
        if kind == "mean":
            return step.weighted_sum(value)
        if kind == "count":
            return step.sum_of_all(step.if_any_rows(value))
        carried = tf.cast(value, tf.int64)
        return tf.cast(step.sum_of_all(carried if step.replica_id == 0 else tf.zeros_like(carried)), value.dtype)


def _leaf(step: steps.ReplicaStep, value: Any) -> _Leaf:
    if not isinstance(value, tf.Tensor):
        return _Leaf("")
    if id(value) in step.results:
        _, metric, index = step.results[id(value)]
        return _Leaf("result", weakref.ref(metric), index)
    if not (value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_bool):
        return _Leaf("")
    if has_rows(step, value):
        return _Leaf("rows")
    if value.dtype.is_floating:
        return _Leaf("mean")
    return _Leaf("count" if value.dtype.is_integer and comes_from_batch(value) else "first")


def _depend(tensors: list[Any], results: list[Any]) -> bool:
    """Returns whether tensors of a graph are computed from results."""
    found = {id(one) for one in results if isinstance(one, tf.Tensor)}
    visited: set[int] = set()
    waiting = list(tensors)
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            return True
        if id(one) not in visited and hasattr(one, "op"):
            visited.add(id(one))
            waiting.extend(one.op.inputs)
    return False


_OF_MODEL: weakref.WeakKeyDictionary[Any, LocalLogs] = weakref.WeakKeyDictionary()


def of_model(model: Any) -> LocalLogs:
    """Returns the logs of a model's local steps; called outside of replicas before its first local step.

    Args:
        model: The model.
    """
    if model not in _OF_MODEL:
        _OF_MODEL[model] = LocalLogs(model.distribute_strategy)
    return _OF_MODEL[model]


def epoch_logs(original: Any, model: Any, logs: Any) -> Any:
    """Hook of Keras's read of the metrics at the end of an epoch: merges logs that are not results of all metrics.

    Args:
        original: Keras's own method.
        model: The model.
        logs: Those of the last step.
    """
    found = original(model, logs)
    of_steps = _OF_MODEL.get(model)
    if of_steps is None or found is not logs or logs is not of_steps.last or not logs:
        return found
    return of_steps.merged(logs)
