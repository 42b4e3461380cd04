"""Begins and ends Keras train steps in which each replica trains alone."""

from __future__ import annotations

from typing import Any

import keras

from tfdistkit.communication.reducer import Reducer
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.local_steps import layer_state, logs
from tfdistkit.strategies.sync import step as steps


def are_next(strategy: Any) -> bool:
    """Returns whether all steps of the next execution are local.

    Args:
        strategy: The strategy of the model.
    """
    return len(strategy.extended.worker_devices) == 1 and strategy.reducer.trains_alone()


def prepare(model: Any) -> None:
    """Makes the state of local steps, which takes collectives; called outside of replicas, on all ranks.

    Args:
        model: The model.
    """
    layer_state.of_model(model)
    logs.of_model(model)


def begin(step: steps.ReplicaStep) -> None:
    """Begins a local step in a replica.

    Args:
        step: The step of this replica, which knows its model.
    """
    logs.of_model(step.model).begin_step(step)


def end(step: steps.ReplicaStep, step_logs: Any) -> Any:
    """Ends a local step in a replica, as `metric_sync.agree` ends a synchronous one, but without communication.

    Args:
        step: The step of this replica.
        step_logs: The result of the train step.

    Returns:
        The logs of this replica.
    """
    layer_state.of_model(step.model).end_step(step)
    return logs.of_model(step.model).end_step(step, step_logs)


def require_agreed_stops(strategy: Any, callbacks: Any) -> None:
    """Refuses a callback of Keras that stops by the logs of a step, which differ between ranks in local steps.

    Args:
        strategy: The strategy of the model.
        callbacks: Those of `fit`.

    Raises:
        UnsupportedError: for a `TerminateOnNaN` outside of `StopTogether`: one rank alone would stop.
    """
    if not private_api.is_ours(strategy) or strategy.num_replicas_in_sync == 1:
        return
    if type(strategy.reducer).trains_alone is Reducer.trains_alone:
        return
    given = callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else callbacks
    if any(isinstance(one, keras.callbacks.TerminateOnNaN) for one in keras.tree.flatten(given or [])):
        raise UnsupportedError(
            explain(
                "TerminateOnNaN must be wrapped in StopTogether here: with an algorithm the logs of a step are those "
                "of one rank, which would stop alone.",
                received=f"TerminateOnNaN() with {strategy.reducer.describe()}",
                expected="tfdistkit.callbacks.StopTogether(keras.callbacks.TerminateOnNaN(), check_every=100), say",
                do="Wrap it; `check_every` is the number of batches between two checks.",
            )
        )
