"""Keeps sums over the replicas of one process from deadlocks: orders, refuses, or limits in time what leads to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api, private_collectives
from tfdistkit.strategies.sync import collective_timeout
from tfdistkit.strategies.sync import step as steps

# Stateful operations that TensorFlow does not order.
_UNORDERED = ("Collective", "Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial", "CudnnRNN")


# The thread that trains or evaluates on several replicas, and how many calls of it are inside each other.
_owner: list[int] = []
_lock = threading.Lock()


@contextlib.contextmanager
def in_one_thread(strategy: Any, trains: bool) -> Iterator[None]:
    """Lets one thread at a time train or evaluate where replicas sum by collectives, which meet by their order.

    Args:
        strategy: The strategy of the model.
        trains: Whether the call trains. Evaluations in one process meet no replica of another process.

    Raises:
        UnsupportedError: if another thread does.
    """
    replicas = strategy.num_replicas_in_sync if private_api.is_ours(strategy) else 1
    if replicas == 1 or not (trains or replicas > len(strategy.extended.worker_devices)):
        yield
        return
    own = threading.get_ident()
    with _lock:
        is_other = bool(_owner) and _owner[0] != own
        if not is_other:
            _owner.append(own)
    if is_other:
        raise UnsupportedError(
            explain(
                "One thread at a time may call `fit` or `evaluate` on several replicas: the sums of two trainings "
                "would meet each other.",
                received=f"a call in the thread {threading.current_thread().name!r} while another thread is in one",
                do="Call them one after the other, on every rank in the same order, or train each model in a job of "
                "its own.",
            )
        )
    try:
        yield
    finally:
        with _lock:
            _owner.pop()


def sum_without_deadlock(reduce: Callable[[Any], Any], value: Any) -> Any:
    """Sums over several replicas of this process; refuses sums that would deadlock.

    Args:
        reduce: Sums a value over the replicas.
        value: This replica's tensors.

    Returns:
        The result of `reduce`.

    Raises:
        UnsupportedError: if the replicas would deadlock.
    """
    step = steps.current()
    if step is None or tf.executing_eagerly():
        return reduce(value)
    _require_no_deadlock(step)
    _note_sum(step, value)
    if not private_api.is_in_branch(step.graph):
        return reduce(value)
    context = tf.distribute.get_replica_context()
    replica = private_api.replica_id(context) - private_api.first_replica_id(context.strategy)
    return collective_timeout.in_branch(reduce, value, replica, len(context.strategy.extended.worker_devices))


class SumsOfReplicas:
    """The sums that each replica of this process is traced with, in one call of `strategy.run`.

    Replicas that run other sums wait for each other without end: one that was traced for no rows, for example, from
    which layers make another graph.
    """

    def __init__(self) -> None:
        self._of_replicas: list[list[list[tf.TensorShape]]] = []
        self._without_rows: list[int] = []

    @contextlib.contextmanager
    def tracing_replica(self) -> Iterator[None]:
        """Notes the sums that its body traces, in the thread of a replica."""
        _traced.sums, _traced.has_rows = [], True
        yield
        if not _traced.has_rows:
            self._without_rows.append(len(self._of_replicas))
        self._of_replicas.append(_traced.sums)

    def require_equal(self) -> None:
        """Requires the same sums of all replicas.

        Raises:
            UnsupportedError: if they differ.
        """
        first = self._of_replicas[0]
        for number, other in enumerate(self._of_replicas):
            if len(other) != len(first) or not all(map(_are_compatible, first, other)):
                raise _other_sums(number, len(first), len(other), self._without_rows)


# The sums of the replica that is traced in a thread, by the shapes of their tensors, and whether it has rows.
_traced = threading.local()


def _note_sum(step: steps.ReplicaStep, value: Any) -> None:
    shapes = [tf.TensorShape(getattr(one, "shape", None)) for one in tf.nest.flatten(value)]
    _traced.sums = [*getattr(_traced, "sums", []), shapes]
    _traced.has_rows = step.has_placeholder or step.held_rows != 0


def _are_compatible(first: list[tf.TensorShape], other: list[tf.TensorShape]) -> bool:
    return len(first) == len(other) and all(one.is_compatible_with(two) for one, two in zip(first, other))


def _other_sums(number: int, first: int, other: int, without_rows: list[int]) -> UnsupportedError:
    rows = f"; no rows of this batch on replica {without_rows[0]}" if without_rows else ""
    batch = "Batch with `drop_remainder=True`, or train with `fit`, where such a replica has a row of weight 0."
    depends = "Let no code of the step depend on the replica, or on its number of rows (`x.shape[0]`)."
    return UnsupportedError(
        explain(
            "All replicas must run the same sums (optimizer.apply, all_reduce, synchronized BatchNormalization), or "
            "they wait for each other without end.",
            received=f"{first} on replica 0, {other} on replica {number}"
            + (", of other shapes" if first == other else "")
            + rows,
            do=batch if without_rows else depends,
        )
    )


@contextlib.contextmanager
def ordered_by_replica() -> Iterator[None]:
    """Orders the side effects of a replica (assertions, prints, Python functions) among themselves only, in a graph.

    Replicas are traced one after the other, and TensorFlow orders side effects as they were traced. If one of the first
    replica follows a sum over the replicas, and one of the second precedes it, each replica waits for the other: an
    assertion in a loss, and another one in a metric that gets the rows of all replicas.
    """
    graph: Any = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    manager = getattr(graph, "experimental_acd_manager", None)
    first = 0 if manager is None else graph.num_operations()
    yield
    if manager is not None:
        made = graph.get_operations()[first:]
        private_collectives.run_after_each_other(graph, [one for one in made if _has_only_side_effects(one)])


def _has_only_side_effects(operation: Any) -> bool:
    if not operation.op_def.is_stateful or operation.type.startswith(_UNORDERED):
        return False
    return not any(one.dtype in (tf.resource, tf.variant) for one in operation.inputs)


def _require_no_deadlock(step: steps.ReplicaStep) -> None:
    if step.is_eager:
        raise UnsupportedError(
            explain(
                "Replicas of one process must not all-reduce in a tf.function that they call eagerly: the first would "
                "deadlock, because the second runs after it.",
                received="an all-reduce (such as optimizer.apply) in a tf.function in an eager strategy.run",
                expected="strategy.run in the tf.function, or the tf.function itself given to strategy.run",
                do="Put the call of strategy.run into a tf.function.",
            )
        )
    if private_api.is_in_loop(step.graph):
        raise UnsupportedError(
            explain(
                "Replicas of one process must not all-reduce in a loop inside of the step: each has its own loop in "
                "the graph, and they would deadlock.",
                received="an all-reduce (such as optimizer.apply) in `for ... in tf.range(...)` or `tf.while_loop`",
                expected="the loop around strategy.run, or a Python loop (`range`), which is unrolled",
                do="Move the loop out of the function that is given to strategy.run.",
            )
        )
