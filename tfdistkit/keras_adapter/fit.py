"""Hooks of `fit` for callbacks that wrap `fit`, or resume in the middle of an epoch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras

from tfdistkit.data.batch_info import info_of
from tfdistkit.keras_adapter import data_position
from tfdistkit.keras_adapter.shared_files import warn_of_shared_files


@contextlib.contextmanager
def arguments_of_fit(original: Any, model: Any, args: tuple, kwargs: dict) -> Iterator[inspect.BoundArguments]:
    """Enters the `tfdistkit_wrap_fit` of each callback, which may change the arguments of `fit`.

    Args:
        original: Keras's `fit`.
        model: The model.
        args: The user's positional arguments.
        kwargs: The user's keyword arguments.

    Yields:
        The arguments for `fit`.
    """
    call = inspect.signature(original).bind(model, *args, **kwargs)
    given = call.arguments.get("callbacks")
    callbacks = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given or [])
    warn_of_shared_files(model.distribute_strategy, callbacks)
    with contextlib.ExitStack() as stack:
        for one in list(callbacks):
            if hasattr(one, "tfdistkit_wrap_fit"):
                stack.enter_context(one.tfdistkit_wrap_fit(model, call.arguments))
        yield call


def epoch_steps(original: Any, iterator: Any) -> Any:
    """Yields the steps of an epoch, from the position of a callback that resumes training."""
    info = info_of(iterator)
    steps = original(iterator) if info.position is None else info.position.steps(original, iterator)
    return steps if info.comparison is None else info.comparison.steps(iterator, steps)


def epoch_data(original: Any, iterator: Any) -> Any:
    """Counts an iterator over training data, or checks one over other data."""
    position = info_of(iterator).position
    if position is not None:
        position.count_iterator()
    else:
        data_position.check_other_iterator(iterator)
    return original(iterator)


def epoch_logs(original: Any, model: Any, logs: Any) -> Any:
    """Returns the logs of an epoch; those from before a restart if its last step ran before."""
    return original(model, logs or data_position.kept_logs(model))
