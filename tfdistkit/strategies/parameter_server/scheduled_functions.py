"""Functions that a loop of the user's own schedules on workers: no update of a Keras variable is lost in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.strategies.parameter_server import atomic_updates


def count_updates(coordinator: Any) -> Callable[..., Any]:
    """Makes `coordinator.schedule(fn)` count all updates, also where `fn` does not call `strategy.run`.

    Args:
        coordinator: The `tf.distribute.coordinator.ClusterCoordinator` of a strategy, of which there is one.

    Returns:
        TensorFlow's own method, for functions that count by themselves.
    """
    schedule, wrapped = coordinator.schedule, weakref.WeakKeyDictionary[Any, Any]()

    def scheduled(fn: Any, args: Any = None, kwargs: Any = None) -> Any:
        # A concrete function is traced already.
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            if fn not in wrapped:
                wrapped[fn] = _counting(fn)
            fn = wrapped[fn]
        return schedule(fn, args=args, kwargs=kwargs)

    coordinator.schedule = scheduled
    return schedule


def _counting(fn: Callable[..., Any]) -> Any:
    own = weakref.ref(fn)

    def counting(*args: Any, **kwargs: Any) -> Any:
        with atomic_updates.running():
            return own()(*args, **kwargs)  # type: ignore[misc]

    return tf.function(counting, autograph=False)
