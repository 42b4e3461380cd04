"""The code that touches private names of TensorFlow's collectives: their keys, their launch, their end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as tf_context
from tensorflow.python.ops import collective_ops


def group_key_of(launcher: Any) -> int:
    """Returns the key of the group in which a replica launches its collectives."""
    return int(launcher._group_key)


def draw_instance_key(launcher: Any) -> tf.Tensor:
    """Returns the key of a new collective of a replica, an eager tensor."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.constant(launcher._collective_keys.get_instance_key(launcher._group_key, launcher._device), tf.int32)


def capture_at_every_call(graph: Any, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Returns what stands in a traced function for a scalar int32 that is drawn whenever the function is called.

    Args:
        graph: What is traced: the graph of a function, or of a branch or a loop in it.
        draw: Returns an eager tensor.
    """
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    with graph.as_default():
        return graph.capture_call_time_value(draw, tf.TensorSpec([], tf.int32))


def abort_collectives(message: str) -> None:
    """Ends the collectives of this process, all that run and all that come, with a DeadlineExceededError."""
    tf_context.context().abort_collective_ops(tf.errors.DEADLINE_EXCEEDED, message)


def tell_other_workers(message: str) -> None:
    """Ends the collectives of the other workers with an error; TensorFlow's own coordination carries it."""
    tf_context.context().report_error_to_cluster(tf.errors.INTERNAL, message)


def gather_equal(strategy: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Concatenates tensors of one shape along axis 0, without a collective that compares their shapes.

    Args:
        strategy: A `MultiWorkerMirroredStrategy` with one replica for each process.
        tensor: A tensor of a dtype and shape that all processes have; TensorFlow gathers no bytes.
    """
    return _launch(strategy, collective_ops.all_gather_v2, tensor)


def exchange_equal(strategy: Any, rows: tf.Tensor) -> tf.Tensor:
    """Sends row i to process i, and returns the rows that the processes sent to this one.

    Args:
        strategy: As in `gather_equal`.
        rows: A row for each process, of a dtype and shape that all processes have.
    """
    return _launch(strategy, collective_ops.all_to_all_v2, rows)


def launcher_of_group(strategy: Any, group_key: int, group_size: int) -> Any:
    """Returns what launches collectives between some of the processes of a strategy; called in these only.

    Args:
        strategy: As in `gather_equal`.
        group_key: A number for them that no other group has.
        group_size: How many they are.
    """
    [whole] = strategy.extended._cross_device_ops._launchers
    keys = type(whole._collective_keys)(group_key)
    assert keys.get_group_key([whole._device]) == group_key  # From now on it has instance keys.
    return type(whole)(group_key, group_size, keys, whole._device, whole._options)


# Group keys of pairs of processes: between those of strategies of one process and those of several.
_PAIRS = 1 << 29


def exchange_in_pair(strategy: Any, rows: tf.Tensor, own: tf.Tensor, partner: tf.Tensor) -> tf.Tensor:
    """Sends rows to one other process, which calls this with this one as its partner.

    Args:
        strategy: As in `gather_equal`.
        rows: Two rows, the same, of a dtype and shape that both processes have.
        own: The number of this process, a scalar int32 tensor.
        partner: The number of the other one, a scalar int32 tensor.

    Returns:
        This process's row and the other one's, in an order that TensorFlow chooses.
    """
    low, high = tf.minimum(own, partner), tf.maximum(own, partner)
    key = _PAIRS + low * strategy.num_replicas_in_sync + high
    return _launch(strategy, collective_ops.all_to_all_v2, rows, 2, key)


def _launch(
    strategy: Any, collective: Callable[..., tf.Tensor], tensor: tf.Tensor, size: int = 0, group: Any = None
) -> tf.Tensor:
    # TensorFlow's strategies launch no all-to-all, and compare the shapes of a gather.
    [launcher] = strategy.extended._cross_device_ops._launchers
    key, token = launcher._next_instance_key(), launcher._get_ordering_token()
    with tf.device(launcher._device):
        return collective(
            tensor,
            size or launcher._group_size,
            launcher._group_key if group is None else group,
            key,
            communication_hint=launcher._options.implementation.value,
            timeout=launcher._options.timeout_seconds,
            ordering_token=token,
        )


def run_after_each_other(graph: Any, operations: list[Any]) -> None:
    """Orders operations with side effects among themselves, and with no other one of their graph.

    Args:
        graph: A graph that is being traced.
        operations: Its operations, in the order in which they are to run.
    """
    for operation in operations:
        graph.experimental_acd_manager.run_independently(operation)
    for before, after in itertools.pairwise(operations):
        after._add_control_input(before)
