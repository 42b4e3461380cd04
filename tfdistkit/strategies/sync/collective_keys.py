"""Keys of collectives: unique for each strategy of a process, and reused to bound memory.

TensorFlow identifies a collective by a group key and an instance key. All of its own strategies begin at the same
numbers, so the collectives of two strategies in one process collide ("Shape mismatch in the collective instance").

It also keeps 1.5 kB for each instance key until the process exits, and takes a new key whenever a collective runs:
1.5 GB after a million steps. Replicas of one process, which are always traced together, draw a few keys for each
collective of a function and reuse them. Several processes cannot: one may retrace a function where its peers do not.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.keras_adapter import private_collectives
from tfdistkit.strategies.sync import collective_timeout

# Group keys of strategies with all replicas in one process. A strategy takes one key for each group of devices;
# TensorFlow's own strategies begin at 0.
_FIRST_BASE = 1 << 16
_BASES = itertools.count(_FIRST_BASE, 1 << 8)

# Group keys of strategies of several processes: equal in all processes, however many strategies each of them made.
BASE_OF_PROCESSES = 1 << 30


def next_base() -> int:
    """Returns the first group key of a new strategy of this process."""
    return next(_BASES)


# Keys of a collective. It needs several, because it may run several times in a step.
_KEYS_OF_ONE = 64

# Keys of collectives whose size is known only at run time: above all others, with one key per size.
_SIZED = 1 << 30
_SIZES = 1 << 5
# Tensors of other sizes are padded to the next of these.
_PADDED = [1 << n for n in range(6, 31)]

# From this size on more pieces were faster in every measurement: 100 MB over two processes 1.7 times, 25 MB over four
# 1.1 times. 10 MB over four took 1.06 times as long.
_LARGE_BYTES = 16 << 20
_PIECES = 32

_launching = threading.local()


def size_above(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the number for `of_size`, and the size to which tensors are padded; scalar int32 tensors."""
    sizes = tf.constant(_PADDED)
    number = tf.reduce_sum(tf.cast(sizes < size, tf.int32))
    return number, sizes[number]


@contextlib.contextmanager
def of_size(number: tf.Tensor) -> Iterator[None]:
    """Gives all-reduces of a function keys by their size.

    TensorFlow requires one shape for each key, and a loop (several steps in an execution) runs with one key.

    Args:
        number: The number of the size, below 32, the same on all replicas; a scalar int32 tensor.
    """
    _launching.size = number
    try:
        yield
    finally:
        _launching.size = None


def launch_all_reduce(original: Any, launcher: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of the launch of a replica's all-reduce; reuses keys only for a static shape, which TensorFlow requires."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    is_here = _FIRST_BASE <= private_collectives.group_key_of(launcher) < BASE_OF_PROCESSES
    can_reuse = is_here and graph is not None and graph.building_function
    _launching.can_reuse = can_reuse and tf.TensorShape(input_tensor.shape).is_fully_defined()
    try:
        return original(launcher, input_tensor, *args, **kwargs)
    finally:
        _launching.can_reuse = False


def instance_key(original: Any, launcher: Any) -> Any:
    """Hook of the function that returns the key of a collective."""
    size = getattr(_launching, "size", None)
    if size is not None and not tf.executing_eagerly():
        return _SIZED + tf.math.floormod(original(launcher), _SIZED // _SIZES) * _SIZES + size
    if not getattr(_launching, "can_reuse", False):
        return original(launcher)
    return private_collectives.capture_at_every_call(tf.compat.v1.get_default_graph(), _Keys(launcher))


def all_reduce(original: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of TensorFlow's all-reduce: cuts large tensors into pieces, so that some travel while others are added.

    TensorFlow makes at most two pieces for each device, whatever the size.

    Args:
        original: TensorFlow's own function.
        t: The tensor.
        args: As in TensorFlow.
        kwargs: As in TensorFlow.

    Returns:
        The sum.
    """
    t = tf.convert_to_tensor(t)
    if t.shape.is_fully_defined() and t.shape.num_elements() * t.dtype.size >= _LARGE_BYTES:
        kwargs = {"max_subdivs_per_device": _PIECES, **kwargs}
    return collective_timeout.around(original, t, *args, **kwargs)


class _Keys:
    """Cycles through the keys of one collective of one replica.

    Args:
        launcher: The launcher of the replica's collectives.
    """

    def __init__(self, launcher: Any):
        self._launcher = launcher
        self._keys: list[tf.Tensor] = []
        self._calls = 0

    def __call__(self) -> tf.Tensor:
        if len(self._keys) < _KEYS_OF_ONE:
            self._keys.append(private_collectives.draw_instance_key(self._launcher))
        key = self._keys[self._calls % _KEYS_OF_ONE]
        self._calls += 1
        return key


def capture_in_function(original: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets a branch or a loop get a call-time value (a collective's key) from its outer function.

    TensorFlow makes the placeholder inside the branch, where nothing ever feeds it: a tf.function with a
    collective in it fails when it is called in a branch, as Keras does with `steps_per_execution` > 1
    ("You must feed a value for placeholder tensor"). Outside of that case this is never called.
    """
    with graph.outer_graph.as_default():
        return graph.outer_graph.capture_call_time_value(*args, **kwargs)
