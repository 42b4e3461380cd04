"""Chooses the communicator for a call: of the strategy in scope, else of the strategy that was made last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import registry
from tfdistkit.collectives.communicators import Communicator, TensorFlowCommunicator
from tfdistkit.collectives.shm.communicator import SharedMemoryCommunicator
from tfdistkit.errors import UnsupportedError, explain

# Parts of the errors of TensorFlow and Horovod for ranks that call with different shapes or dtypes.
_MISMATCHES = ("mismatch in the collective", "Mismatched ")

Function = TypeVar("Function", bound=Callable[..., Any])


def communicator(process_set: Any = None) -> Communicator:
    """Returns the communicator for a collective that is called here.

    Args:
        process_set: A `ProcessSet`, or None for all ranks of the strategy.

    Returns:
        Inside of `strategy.run`, a communicator between the replicas of that strategy; elsewhere between the
        processes of the strategy in scope, or of the one that was made last.

    Raises:
        UnsupportedError: if there are other workers that cannot be reached from this call.
    """
    strategy, context = _strategy()
    if strategy is None:
        _require_alone()
        return Communicator()
    horovod_set = getattr(strategy, "process_set", None)
    if horovod_set is not None:
        from tfdistkit.collectives.horovod_communicator import HorovodCommunicator  # needs Horovod

        return HorovodCommunicator(horovod_set if process_set is None else process_set.horovod_set)
    if process_set is not None:
        raise no_process_sets(f"process_set={process_set!r}")
    transport = getattr(strategy, "transport", None)
    if transport is not None:
        return SharedMemoryCommunicator(transport)
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise UnsupportedError(
            explain(
                "Collectives need a synchronous strategy: the workers of a parameter server strategy run "
                "asynchronously.",
                received=type(strategy).__name__,
                expected="the strategy 'multiworker' or 'horovod'",
            )
        )
    replicas, processes = strategy.num_replicas_in_sync, registry.process_count(strategy)
    if context is None and 1 < processes < replicas:
        raise UnsupportedError(
            explain(
                "A process with several replicas must call collectives inside of `strategy.run`.",
                received=f"{replicas} replicas in {processes} processes",
                expected="one replica for each process, or a call inside of `strategy.run`",
            )
        )
    size = replicas if context is not None else processes
    return TensorFlowCommunicator(strategy, size) if size > 1 else Communicator()


def no_process_sets(received: str) -> UnsupportedError:
    """Returns the error for a process set under a strategy without Horovod.

    Args:
        received: The call or argument, as the user wrote it.
    """
    return UnsupportedError(
        explain(
            "A process set needs the strategy 'horovod': TensorFlow's collectives have none.",
            received=received,
            do='Use tfdistkit.strategy("horovod").',
        )
    )


def explained(function: Function) -> Function:
    """Wraps a public collective: AutoGraph skips it, and an error names the worker that was lost."""

    @functools.wraps(function)
    @tf.autograph.experimental.do_not_convert
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except tf.errors.OpError as error:
            explained_error = _explained(error)
            if explained_error is None:
                raise
            raise explained_error from error

    return call  # type: ignore[return-value]


def _explained(error: tf.errors.OpError) -> Exception | None:
    """Returns an error of the same type with the cause and the fix; None for an unknown cause."""
    message = str(error.message)
    if any(sign in message for sign in _MISMATCHES):
        text = explain(
            "The ranks called a collective with different shapes or dtypes.",
            received=message.splitlines()[0].rstrip("."),
            do="Set TFDISTKIT_CHECK_COLLECTIVES=1 for all ranks to see what each of them called.",
        )
        return type(error)(error.node_def, error.op, text)
    last = registry.last_made()
    return last.explain_error(error) if last is not None and last.explain_error is not None else None


def _strategy() -> tuple[Any, Any]:
    """Returns the strategy in scope, or the last one made, and the replica context of the call, if there is one."""
    if tf.distribute.has_strategy():
        return tf.distribute.get_strategy(), tf.distribute.get_replica_context()
    last = registry.last_made()
    return (None if last is None else last.strategy), None


def _require_alone() -> None:
    cluster = detect_cluster()
    if cluster.is_training and cluster.world_size > 1:
        raise UnsupportedError(
            explain(
                "`tfdistkit.strategy(...)` must be called before the first collective: it connects the workers.",
                received=f"no strategy, on rank {cluster.rank} of {cluster.world_size} in {cluster.source}",
                do="Move the line `strategy = tfdistkit.strategy(...)` to the top of the script.",
            )
        )
