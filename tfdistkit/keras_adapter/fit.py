"""Hooks of `fit` for callbacks that begin an epoch in the middle, or have to be around all of `fit`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras

from tfdistkit.keras_adapter import data_position
from tfdistkit.keras_adapter.shared_files import warn_of_shared_files


@contextlib.contextmanager
def arguments_of_fit(original: Any, model: Any, args: tuple, kwargs: dict) -> Iterator[inspect.BoundArguments]:
    """Lets callbacks that ask for it be around `fit`, and change its arguments before it looks at them.

    Args:
        original: Keras's `fit`.
        model: The model.
        args: What it was called with.
        kwargs: What it was called with.

    Yields:
        What to call it with.
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
    """Begins an epoch in the middle, where a callback that resumes a training asked for it."""
    followed = getattr(iterator, "tfdistkit_data", None)
    steps = original(iterator) if followed is None else followed.steps(original, iterator)
    comparison = getattr(iterator, "tfdistkit_comparison", None)
    return steps if comparison is None else comparison.steps(iterator, steps)


def epoch_data(original: Any, iterator: Any) -> Any:
    """Called for each iterator over the data."""
    if getattr(iterator, "tfdistkit_data", None) is not None:
        iterator.tfdistkit_data.count_iterator()
    else:
        data_position.read_beside(iterator)
    return original(iterator)


def epoch_logs(original: Any, model: Any, logs: Any) -> Any:
    """Gives an epoch the logs of its last step where that ran before a restart."""
    return original(model, logs or data_position.kept_logs(model))
