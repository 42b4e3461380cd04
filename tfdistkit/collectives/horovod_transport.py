"""Wraps Horovod's operations for the strategies: lists of tensors, every dtype, names independent of layers.

The only module that imports Horovod. Horovod matches tensors of the ranks by operation name, and its default names
follow the names of layers, which differ between ranks that built other models before. Here operations are numbered
within the outermost function that is being traced.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.collectives import registry
from tfdistkit.collectives.carriers import carriers_for
from tfdistkit.errors import MissingDependencyError, explain

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    raise MissingDependencyError(
        explain(
            "Horovod is not installed for this TensorFlow, or cannot be loaded.",
            received=str(error).splitlines()[0],
            do="Build and install it: tfdistkit horovod install",
        )
    ) from error

# Dtypes that Horovod cannot send, and the dtype that carries each.
_CARRIED_AS = carriers_for(lambda dtype: dtype in (tf.bfloat16, tf.uint32, tf.uint64))

# Tensors of as many bytes are not packed: copying them takes longer than a message more.
_LONG_BYTES = 1 << 20

_COUNTER = "_tfdistkit_horovod_operations"


def all_reduce(tensors: list[Any], reduce_op: tf.distribute.ReduceOp, process_set: Any = None) -> list[Any]:
    """Sums or averages tensors over the ranks, one fused operation for the dense tensors of each dtype.

    Args:
        tensors: Tensors or IndexedSlices, of the same dtypes and shapes on every rank; IndexedSlices may
            have different numbers of rows.
        reduce_op: SUM or MEAN. The mean of integers is rounded down.
        process_set: The Horovod process set to stay in. Default: all ranks.

    Returns:
        The reduced tensors, in the same order.
    """
    results: list[Any] = [None] * len(tensors)
    process_set = process_set or hvd.global_process_set
    mean = reduce_op == tf.distribute.ReduceOp.MEAN
    dense: dict[tf.DType, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = _reduce_slices(tensor, mean, process_set)
        else:
            dense.setdefault(tf.convert_to_tensor(tensor).dtype, []).append(i)
    for dtype, indices in dense.items():
        carried = [tf.cast(tensors[i], _CARRIED_AS.get(dtype, dtype)) for i in indices]
        reduced = sum_of_one_dtype(carried, next_name("all_reduce", process_set), process_set)
        for i, value in zip(indices, reduced):
            results[i] = tf.cast(_divide(value, process_set.size()) if mean else value, dtype)
    return awaited(results)


def sum_of_one_dtype(tensors: list[Any], name: str | None, process_set: Any) -> list[Any]:
    """Sums tensors over the ranks in one operation.

    Args:
        tensors: Dense tensors of one dtype that Horovod can send, of the same shapes on every rank.
        name: The name of the operation, by which the ranks match; None in eager mode, where Horovod counts by itself.
        process_set: The Horovod process set to stay in.

    Returns:
        The sums, in the same order.
    """
    packed = [i for i, tensor in enumerate(tensors) if _is_short(tensor)] if order_matters(hvd.size()) else []
    alone = [i for i in range(len(tensors)) if i not in packed]
    sent = [_packed([tensors[i] for i in packed])] if packed else []
    sent += [tensors[i] for i in alone]
    sums = hvd.grouped_allreduce(
        [opaque(sent[0]), *sent[1:]],  # One is enough: they are inputs of one operation.
        op=hvd.Sum,
        process_set=process_set,
        name=name,
        ignore_name_scope=True,
    )
    results = dict(zip(packed, _unpacked(sums.pop(0), [tensors[i] for i in packed]))) if packed else {}
    results.update(zip(alone, sums))
    return [results[i] for i in range(len(tensors))]


def order_matters(ranks: int) -> bool:
    """Returns whether the sum of an element can depend on where in Horovod's buffer it is: `a + b` is `b + a`.

    Horovod fuses operations that are ready at the same time into one buffer, and which those are depends on the speed
    of the ranks. In a ring the place in the buffer decides with which rank the sum of an element begins. So
    for three ranks and more we pack the short tensors of an operation ourselves, and Horovod fuses none (`options`).

    Args:
        ranks: The number of ranks of the job.
    """
    return ranks > 2


def _is_short(tensor: tf.Tensor) -> bool:
    """Returns whether a message of its own costs more than copying a tensor."""
    elements = tensor.shape.num_elements()
    return elements is None or elements * tensor.dtype.size < _LONG_BYTES


def _packed(tensors: list[Any]) -> tf.Tensor:
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _unpacked(vector: tf.Tensor, like: list[Any]) -> list[tf.Tensor]:
    parts = tf.split(vector, [tf.size(tensor) for tensor in like])
    return [tf.ensure_shape(tf.reshape(part, tf.shape(one)), one.shape) for part, one in zip(parts, like)]


def _reduce_slices(slices: tf.IndexedSlices, mean: bool, process_set: Any) -> tf.IndexedSlices:
    values = all_gather(slices.values, 0, process_set)
    indices = all_gather(slices.indices, 0, process_set)
    return tf.IndexedSlices(_divide(values, process_set.size()) if mean else values, indices, slices.dense_shape)


def _divide(value: tf.Tensor, size: int) -> tf.Tensor:
    return value // size if value.dtype.is_integer else value / tf.cast(size, value.dtype)


def all_gather(tensor: tf.Tensor, axis: int = 0, process_set: Any = None) -> tf.Tensor:
    """Concatenates the tensors of all ranks in rank order.

    Args:
        tensor: A tensor whose length along `axis` may differ between ranks.
        axis: The axis to concatenate along.
        process_set: The Horovod process set to stay in. Default: all ranks.

    Returns:
        The concatenation, on every rank.
    """
    tensor = tf.convert_to_tensor(tensor)
    carried = tf.cast(tensor, _CARRIED_AS.get(tensor.dtype, tensor.dtype))
    swap = list(range(tensor.shape.rank))
    swap[0], swap[axis] = swap[axis], swap[0]
    if axis:
        carried = tf.transpose(carried, swap)
    gathered = hvd.allgather(
        opaque(carried),
        name=next_name("all_gather", process_set),
        ignore_name_scope=True,
        process_set=process_set or hvd.global_process_set,
    )
    return awaited(tf.cast(tf.transpose(gathered, swap) if axis else gathered, tensor.dtype))


def broadcast(tensor: tf.Tensor, root_rank: int = 0, process_set: Any = None) -> tf.Tensor:
    """Broadcasts a tensor from one rank to all.

    Args:
        tensor: A tensor of the same dtype and shape on every rank.
        root_rank: The rank that sends.
        process_set: The Horovod process set to stay in. Default: all ranks.

    Returns:
        The tensor of `root_rank`.
    """
    tensor = tf.convert_to_tensor(tensor)
    carried = tf.cast(tensor, _CARRIED_AS.get(tensor.dtype, tensor.dtype))
    sent = hvd.broadcast(
        opaque(carried),
        root_rank,
        name=next_name("broadcast", process_set),
        ignore_name_scope=True,
        process_set=process_set or hvd.global_process_set,
    )
    # Horovod returns a scalar as a vector of one element.
    return awaited(tf.cast(tf.reshape(sent, tf.shape(tensor)), tensor.dtype))


def all_to_all(tensor: tf.Tensor, process_set: Any = None, splits: Any = None) -> tf.Tensor:
    """Sends the n-th part of a tensor to the n-th rank.

    Args:
        tensor: A tensor whose first dimension is divided among the ranks.
        process_set: The Horovod process set to stay in. Default: all ranks.
        splits: How much of it each rank gets, a vector. Default: equal parts.

    Returns:
        The parts that the ranks sent to this one, in rank order.
    """
    with tf.device("CPU:0"):  # Horovod reads the splits on the host.
        lengths = None if splits is None else opaque(tf.cast(splits, tf.int32))
    received: Any = hvd.alltoall(
        opaque(tensor),
        splits=lengths,
        name=next_name("all_to_all", process_set),
        ignore_name_scope=True,
        process_set=process_set or hvd.global_process_set,
    )
    return awaited(received if splits is None else received[0])


def awaited(results: Any) -> Any:
    """Makes the traced function or loop iteration wait for some operations before it ends.

    TensorFlow does not treat Horovod's operations as stateful: a loop (`steps_per_execution`) would start the next
    iteration while this one's all-reduce is in flight, and Horovod refuses a second operation of the same name.
    """
    if not tf.executing_eagerly():
        with tf.control_dependencies(tf.nest.flatten(results, expand_composites=True)):
            # An assertion is stateful, so the iteration waits for it.
            tf.raw_ops.Assert(condition=tf.constant(True), data=[tf.constant("unreachable")])
    return results


def kept(result: tf.Tensor) -> tf.Tensor:
    """Keeps TensorFlow from pruning the operation behind a tensor on a rank that has no use for the result.

    TensorFlow treats Horovod's operations as pure functions, and the other ranks would wait for this one.
    """
    last = registry.last_made()
    if not tf.executing_eagerly() and last is not None and last.calls is not None:
        last.calls.keep(result)
    return result


def opaque(tensor: tf.Tensor) -> tf.Tensor:
    """Hides from the traced graph that a tensor is a constant.

    TensorFlow treats Horovod's operations as pure functions: it folds an operation on constants while it traces or
    optimises a graph - on the rank that traces, while its peers wait.
    """
    last = registry.last_made()
    return tensor if tf.executing_eagerly() or last is None or last.calls is None else last.calls.hide(tensor)


def next_name(kind: str, process_set: Any = None) -> str | None:
    """Returns the next operation name in the outermost function; None in eager mode, where Horovod counts by itself.

    Each process set has its own numbers, because only its ranks count its operations.
    """
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    counter = f"{_COUNTER}_{(process_set or hvd.global_process_set).process_set_id}"
    number = getattr(graph, counter, 0)
    setattr(graph, counter, number + 1)
    return f"tfdistkit_{kind}_{number}"
