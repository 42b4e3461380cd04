"""Keys of collectives: whose they are, so that those of several strategies in one process never meet.

TensorFlow knows a collective by the key of its group and that of the instance. All of its own strategies begin at the
same numbers: two in one process take each other's collectives for theirs ("Shape mismatch in the collective
instance").

It also keeps 1.5 kB for each key of an instance, for ever, and takes a new key whenever a collective runs: 1.5 GB after
a million steps. Replicas of one process, which are always traced together, take a few keys for each collective of a
function and use them again. Several processes cannot: one may trace a function again where another need not.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_api

# Group keys of strategies whose replicas live in one process. A strategy takes one for each group of devices;
# TensorFlow's own strategies begin at 0.
_FIRST_BASE = 1 << 16
_BASES = itertools.count(_FIRST_BASE, 1 << 8)

# Group keys of strategies of several processes: the same number in each, however many strategies one of them made.
BASE_OF_PROCESSES = 1 << 30


def next_base() -> int:
    """Returns where the group keys of a new strategy of this process begin."""
    return next(_BASES)


# So many keys has a collective. One that is called several times in a step must not meet itself.
_KEYS_OF_ONE = 64

# Keys of collectives whose size is known when they run: over all others, and so many for each size.
_SIZED = 1 << 30
_SIZES = 1 << 5

_launching = threading.local()


@contextlib.contextmanager
def of_size(number: tf.Tensor) -> Iterator[None]:
    """Within it, all-reduces of a function have keys for their size.

    TensorFlow wants one shape for a key, and a loop (several steps in an execution) runs with one key.

    Args:
        number: Which of 32 sizes it is, the same on all replicas; a scalar int32 tensor.
    """
    _launching.size = number
    try:
        yield
    finally:
        _launching.size = None


def launch_all_reduce(original: Any, launcher: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of what launches a replica's all-reduce. TensorFlow keeps its shape with the key: it has to be known."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    is_here = _FIRST_BASE <= private_api.group_key_of(launcher) < BASE_OF_PROCESSES
    can_reuse = is_here and graph is not None and graph.building_function
    _launching.can_reuse = can_reuse and tf.TensorShape(input_tensor.shape).is_fully_defined()
    try:
        return original(launcher, input_tensor, *args, **kwargs)
    finally:
        _launching.can_reuse = False


def instance_key(original: Any, launcher: Any) -> Any:
    """Hook of what gives a collective its key."""
    size = getattr(_launching, "size", None)
    if size is not None and not tf.executing_eagerly():
        return _SIZED + tf.math.floormod(original(launcher), _SIZED // _SIZES) * _SIZES + size
    if not getattr(_launching, "can_reuse", False):
        return original(launcher)
    return private_api.capture_at_every_call(tf.compat.v1.get_default_graph(), _Keys(launcher))


class _Keys:
    """The keys of one collective of one replica, one after the other, and again from the first on.

    Args:
        launcher: What launches the collectives of the replica.
    """

    def __init__(self, launcher: Any):
        self._launcher = launcher
        self._keys: list[tf.Tensor] = []
        self._calls = 0

    def __call__(self) -> tf.Tensor:
        if len(self._keys) < _KEYS_OF_ONE:
            self._keys.append(private_api.draw_instance_key(self._launcher))
        key = self._keys[self._calls % _KEYS_OF_ONE]
        self._calls += 1
        return key
