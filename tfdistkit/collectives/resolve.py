"""Which communicator a call means: by the strategy that is in scope, else by the one that was made last."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import registry
from tfdistkit.collectives.communicators import Communicator, TensorFlowCommunicator
from tfdistkit.errors import UnsupportedError, explain

# What TensorFlow and Horovod say themselves when the ranks do not fit together.
_MISMATCHES = ("mismatch in the collective", "Mismatched ")

Function = TypeVar("Function", bound=Callable[..., Any])


def communicator(process_set: Any = None) -> Communicator:
    """Finds who carries a collective that is called here.

    Args:
        process_set: A `ProcessSet`, or None for all ranks of the strategy.

    Returns:
        Inside of `strategy.run`, a communicator between the replicas of that strategy; elsewhere between the
        processes of the strategy in scope, or of the one that was made last.

    Raises:
        UnsupportedError: if there are other workers, but no way to them from here.
    """
    strategy, context = _strategy()
    if strategy is None:
        _require_alone()
        return Communicator()
    horovod_set = getattr(strategy, "process_set", None)
    if horovod_set is not None:
        from tfdistkit.collectives.horovod_communicator import HorovodCommunicator  # only where Horovod is there

        return HorovodCommunicator(horovod_set if process_set is None else process_set.horovod_set)
    if process_set is not None:
        raise no_process_sets(f"process_set={process_set!r}")
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        raise UnsupportedError(
            explain(
                "Workers of a parameter server strategy do not meet: there are no collectives between them.",
                expected="the strategy 'multiworker' or 'horovod'",
            )
        )
    replicas, processes = strategy.num_replicas_in_sync, registry.process_count(strategy)
    if context is None and 1 < processes < replicas:
        raise UnsupportedError(
            explain(
                "A process with several replicas can call a collective only inside of `strategy.run`.",
                received=f"{replicas} replicas in {processes} processes",
                expected="one replica for each process, or a call in what `strategy.run` runs",
            )
        )
    size = replicas if context is not None else processes
    return TensorFlowCommunicator(strategy, size) if size > 1 else Communicator()


def no_process_sets(received: str) -> UnsupportedError:
    """Returns the error for a process set where Horovod does not carry the collectives.

    Args:
        received: What was asked for.
    """
    return UnsupportedError(
        explain(
            "Only Horovod has process sets; this strategy talks over TensorFlow's collectives.",
            received=received,
            expected="the strategy 'horovod'",
            do='Ask for tfdistkit.strategy("horovod").',
        )
    )


def explained(function: Function) -> Function:
    """Makes a public function of the package: AutoGraph leaves it alone, and a lost worker gets named."""

    @functools.wraps(function)
    @tf.autograph.experimental.do_not_convert
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except tf.errors.OpError as error:
            clear = _clear(error)
            if clear is None:
                raise
            raise clear from error

    return call  # type: ignore[return-value]


def _clear(error: tf.errors.OpError) -> Exception | None:
    """Returns an error of the same type that says what to do; None if nobody knows."""
    message = str(error.message)
    if any(sign in message for sign in _MISMATCHES):
        said = explain(
            "The ranks called a collective with different shapes or dtypes.",
            received=message.splitlines()[0].rstrip("."),
            do="Set TFDISTKIT_CHECK_COLLECTIVES=1 for all ranks to see what each of them called.",
        )
        return type(error)(error.node_def, error.op, said)
    last = registry.last_made()
    return last.explain_error(error) if last is not None and last.explain_error is not None else None


def _strategy() -> tuple[Any, Any]:
    """Returns the strategy that is meant, and the context of the replica that asks, if one does."""
    if tf.distribute.has_strategy():
        return tf.distribute.get_strategy(), tf.distribute.get_replica_context()
    last = registry.last_made()
    return (None if last is None else last.strategy), None


def _require_alone() -> None:
    cluster = detect_cluster()
    if cluster.is_training and cluster.world_size > 1:
        raise UnsupportedError(
            explain(
                "There is no strategy yet, and so no way to the other workers.",
                received=f"rank {cluster.rank} of {cluster.world_size} in {cluster.source}",
                expected="`tfdistkit.strategy(...)` before the first collective",
                do="Move the line `strategy = tfdistkit.strategy(...)` to the top of the script.",
            )
        )
