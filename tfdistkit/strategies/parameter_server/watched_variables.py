"""Variables on parameter servers that the program reads and writes in the order of the steps.

While steps of `fit` are in flight, a callback that clips weights (`w.assign(tf.clip_by_value(w, -1, 1))`) must read
what the steps before have written, and a number that it assigns (`model.beta.assign(0.3)`) must not be read by them. In
one process no step runs meanwhile. Here the program waits for the steps. Keras has hooks for its own variables
(`atomic_updates`); these are for variables of TensorFlow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.strategies.parameter_server import atomic_updates

# What reads or writes a variable. Methods that are not listed here use its `handle`.
_METHODS = ("assign", "assign_add", "assign_sub", "gather_nd", "read_value", "sparse_read", "value", "__tf_tensor__")


def as_watched(variable: Any) -> Any:
    """Makes a variable of TensorFlow tell the watcher (`atomic_updates.watcher`) before the program uses it.

    Args:
        variable: The variable.

    Returns:
        The same one, of a subclass of its class.
    """
    kind: Any = type(variable)
    variable.__class__ = _watched(kind)
    return variable


@functools.cache
def _watched(kind: Any) -> type:
    members: dict[str, Any] = {name: _telling(getattr(kind, name)) for name in _METHODS if hasattr(kind, name)}
    members["handle"] = property(_telling(lambda variable: kind.handle.fget(variable)))
    return type(kind.__name__, (kind,), members)


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def told(variable: Any, *args: Any, **kwargs: Any) -> Any:
        if atomic_updates.watcher is not None and tf.executing_eagerly():
            atomic_updates.watcher.before_use(variable, writes=method.__name__.startswith("assign"))
        return method(variable, *args, **kwargs)

    return told
