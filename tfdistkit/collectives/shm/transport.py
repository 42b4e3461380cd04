"""Offers the operations of an engine to TensorFlow, in eager mode and in graphs.

In a graph an operation is three nodes: one hands the tensors to the engine, one waits, one returns the result. The one
that waits takes an element from a queue of TensorFlow, which holds no thread: however many operations are in flight,
TensorFlow's threads stay free.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.collectives.carriers import carriers_for
from tfdistkit.collectives.shm.engine import Engine
from tfdistkit.collectives.shm.messages import LostPeer, Mismatch, TimedOut
from tfdistkit.collectives.shm.operation import AllToAll, Broadcast, Gather, Operation, Sum, SumOnFirst

# Dtypes that NumPy cannot sum, and the dtype that carries each.
_CARRIED_AS = carriers_for(lambda dtype: dtype in (tf.bfloat16, tf.bool))

# Seconds that a caller waits for the engine beyond the timeout of its operation, which the engine itself ends.
_MORE_S = 60.0
_COUNTER = "_tfdistkit_shared_memory_operations"
# Part of the names of the operations by which a graph calls the engine, to tell them from Python code of the user.
GRAPH_NAME = "tfdistkit_shm"
# The maximum number of runs of one node that are in flight.
_UNDER_WAY = 1 << 10

# Makes an operation of the engine; called with its tag, arrays, timeout, and a function to call at its end.
Make = Callable[[int, list[np.ndarray], float, Callable[[], None]], Operation]


class SharedMemoryTransport:
    """The collectives of the ranks of one host.

    Args:
        engine: The engine, which runs the operations.
        timeout_s: Seconds that an operation waits for the other ranks.
    """

    def __init__(self, engine: Engine, timeout_s: float):
        self.engine, self.timeout_s = engine, timeout_s
        self.rank, self.size = engine.rank, engine.size
        self._running: dict[int, tuple[Operation, threading.Event]] = {}
        self._tickets = itertools.count(1)

    def all_reduce(
        self, tensors: Sequence[Any], reduce_op: tf.distribute.ReduceOp, timeout_s: float | None = None
    ) -> list[Any]:
        """Sums or averages tensors over the ranks, the dense tensors of each dtype in one operation.

        Args:
            tensors: Tensors or IndexedSlices, of the same dtypes and shapes on every rank; IndexedSlices may have
                different numbers of rows.
            reduce_op: SUM or MEAN. The mean of integers is rounded down.
            timeout_s: Seconds to wait. Default: that of the transport.

        Returns:
            The reduced tensors, in the same order.
        """
        results: list[Any] = [None] * len(tensors)
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        dense: dict[tf.DType, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, tf.IndexedSlices):
                results[i] = self._reduce_slices(tensor, mean)
            else:
                dense.setdefault(tf.convert_to_tensor(tensor).dtype, []).append(i)
        for dtype, indices in dense.items():
            carried = [tf.cast(tensors[i], _CARRIED_AS.get(dtype, dtype)) for i in indices]
            shapes = [tensor.shape for tensor in carried]
            summed = self._run("sum", Sum, carried, [carried[0].dtype] * len(carried), shapes, timeout_s)
            for i, value in zip(indices, summed):
                results[i] = tf.cast(self._divide(value) if mean else value, dtype)
        return results

    def sum_on_first(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Sums tensors on rank 0 only, which can send a result to all ranks by `broadcast_from_first`.

        Args:
            tensors: Dense tensors of one dtype, of the same shapes on every rank.

        Returns:
            On rank 0 the sums, flat and concatenated; on the other ranks an empty tensor.
        """
        dtype = tensors[0].dtype
        carried = [tf.cast(tensor, _CARRIED_AS.get(dtype, dtype)) for tensor in tensors]
        size = 0 if self.rank else sum(tensor.shape.num_elements() for tensor in tensors)
        [summed] = self._run("sum on the first", SumOnFirst, carried, [carried[0].dtype], [tf.TensorShape([size])])
        return tf.cast(summed, dtype)

    def broadcast_from_first(self, flat: tf.Tensor, size: int, timeout_s: float) -> tf.Tensor:
        """Broadcasts a flat tensor from rank 0.

        Args:
            flat: The tensor; on the other ranks it has no elements.
            size: The number of its elements on rank 0.
            timeout_s: Seconds to wait for rank 0.
        """
        rows = tf.reshape(flat, [0 if self.rank else 1, size])
        return self._broadcast(rows, 0, timeout_s)

    def _reduce_slices(self, slices: tf.IndexedSlices, mean: bool) -> tf.IndexedSlices:
        values, indices = self.all_gather(slices.values), self.all_gather(slices.indices)
        return tf.IndexedSlices(self._divide(values) if mean else values, indices, slices.dense_shape)

    def _divide(self, value: tf.Tensor) -> tf.Tensor:
        return value // self.size if value.dtype.is_integer else value / tf.cast(self.size, value.dtype)

    def all_gather(self, tensor: Any, axis: int = 0) -> tf.Tensor:
        """Concatenates the tensors of all ranks in rank order.

        Args:
            tensor: A tensor whose length along `axis` may differ between ranks.
            axis: The axis to concatenate along.

        Returns:
            The concatenation, on every rank.
        """
        tensor = tf.convert_to_tensor(tensor)
        carried = tf.cast(tensor, _CARRIED_AS.get(tensor.dtype, tensor.dtype))
        swap = list(range(tensor.shape.rank))
        swap[0], swap[axis] = swap[axis], swap[0]
        if axis:
            carried = tf.transpose(carried, swap)

        def make(tag: int, arrays: list[np.ndarray], timeout_s: float, on_end: Callable[[], None]) -> Operation:
            return Gather(tag, arrays[0], timeout_s, on_end)

        shape = tf.TensorShape([None, *carried.shape[1:]])
        [gathered] = self._run("gather", make, [carried], [carried.dtype], [shape])
        return tf.cast(tf.transpose(gathered, swap) if axis else gathered, tensor.dtype)

    def broadcast(self, tensor: Any, root_rank: int = 0) -> tf.Tensor:
        """Broadcasts a tensor from one rank to all.

        Args:
            tensor: A tensor of the same dtype and shape on every rank.
            root_rank: The rank that sends.

        Returns:
            The tensor of `root_rank`.
        """
        return self._broadcast(tf.convert_to_tensor(tensor)[None], root_rank)

    def _broadcast(self, rows: tf.Tensor, root_rank: int, timeout_s: float | None = None) -> tf.Tensor:
        carried = tf.cast(rows, _CARRIED_AS.get(rows.dtype, rows.dtype))

        def make(tag: int, arrays: list[np.ndarray], timeout_s: float, on_end: Callable[[], None]) -> Operation:
            return Broadcast(tag, arrays[0], root_rank, self.rank == root_rank, timeout_s, on_end)

        shape = tf.TensorShape([1]).concatenate(carried.shape[1:])
        [sent] = self._run("broadcast", make, [carried], [carried.dtype], [shape], timeout_s)
        return tf.cast(sent[0], rows.dtype)

    def all_to_all(self, tensor: Any, splits: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends rows to every rank (all-to-all).

        Args:
            tensor: This rank's rows, those for rank 0 first.
            splits: The number of rows for each rank, int32 or int64.

        Returns:
            The rows that the ranks sent to this one, in rank order, and how many came from each.
        """
        tensor, splits = tf.convert_to_tensor(tensor), tf.convert_to_tensor(splits)
        carried = tf.cast(tensor, _CARRIED_AS.get(tensor.dtype, tensor.dtype))

        def make(tag: int, arrays: list[np.ndarray], timeout_s: float, on_end: Callable[[], None]) -> Operation:
            return AllToAll(tag, arrays[0], arrays[1].tolist(), timeout_s, on_end)

        shapes = [tf.TensorShape([None, *carried.shape[1:]]), tf.TensorShape([self.size])]
        inputs, dtypes = [carried, tf.cast(splits, tf.int64)], [carried.dtype, tf.int64]
        rows, received = self._run("all_to_all", make, inputs, dtypes, shapes)
        return tf.cast(rows, tensor.dtype), tf.cast(received, splits.dtype)

    def sum_in_thread(self, name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Sums arrays over the ranks without a timeout; called in a thread of its own.

        Args:
            name: Identifies the sum among all operations; the same on all ranks.
            arrays: C-contiguous arrays of one dtype.
        """

        def make(tag: int, arrays: list[np.ndarray], timeout_s: float, on_end: Callable[[], None]) -> Operation:
            return Sum(tag, arrays, timeout_s, on_end)

        return self._result(self._start(_tag(f"thread {name}"), make, list(arrays), math.inf, lambda: None))

    # ------------------------------------------------------- running them

    def _run(
        self, kind: str, make: Make, tensors: list[Any], dtypes: list[Any], shapes: list[Any], timeout_s: Any = None
    ) -> list[tf.Tensor]:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        with tf.device("CPU:0"):
            if tf.executing_eagerly():
                arrays = [_as_array(tensor) for tensor in tensors]
                ticket = self._start(_tag(f"eager {kind}"), make, arrays, timeout_s, lambda: None)
                return [tf.convert_to_tensor(array) for array in self._result(ticket)]
            return self._in_graph(_tag(f"{kind} {_number_in_function()}"), make, tensors, dtypes, shapes, timeout_s)

    def _in_graph(
        self, tag: int, make: Make, tensors: list[Any], dtypes: list[Any], shapes: list[Any], timeout_s: float
    ) -> list[tf.Tensor]:
        with tf.init_scope():
            ended = tf.queue.FIFOQueue(_UNDER_WAY, [tf.int64], [[]])
            signals = [tf.zeros([], tf.int64)]

        def tell() -> None:
            # Not `ended.enqueue`, which takes three times as long.
            tf.raw_ops.QueueEnqueueV2(handle=ended.queue_ref, components=signals)

        def start(*arrays: np.ndarray) -> np.ndarray:
            # An int64 of NumPy: TensorFlow caches a tensor of every Python number that it converts.
            return np.int64(self._start(tag, make, list(arrays), timeout_s, tell))

        def finish(ticket: np.ndarray, _: np.ndarray) -> list[np.ndarray]:
            return self._result(int(ticket))

        ticket = tf.numpy_function(start, tensors, tf.int64, stateful=True, name=GRAPH_NAME)
        ticket.set_shape([])
        with tf.control_dependencies([ticket]):
            signal = ended.dequeue()
        results = tf.numpy_function(finish, [ticket, signal], dtypes, stateful=True, name=GRAPH_NAME)
        for result, shape in zip(results, shapes):
            result.set_shape(shape)
        return list(results)

    def _start(self, tag: int, make: Make, arrays: list[np.ndarray], timeout_s: float, tell: Callable[[], Any]) -> int:
        """Hands an operation to the engine, and returns its ticket for `_result`."""
        ticket, ended = next(self._tickets), threading.Event()

        def on_end() -> None:
            ended.set()
            tell()

        operation = make(tag, [np.asarray(array, order="C") for array in arrays], timeout_s, on_end)
        self._running[ticket] = (operation, ended)
        self.engine.call(operation)
        return ticket

    def _result(self, ticket: int) -> list[np.ndarray]:
        """Waits for an operation, and returns its result.

        Raises:
            tf.errors.OpError: if it failed.
        """
        operation, ended = self._running.pop(ticket)
        if not ended.wait(operation.timeout_s + _MORE_S if math.isfinite(operation.timeout_s) else None):
            raise as_tensorflow_error(LostPeer("the thread of this rank's collectives"))
        if operation.error is not None:
            raise as_tensorflow_error(operation.error)
        return operation.result


def _as_array(tensor: Any) -> np.ndarray:
    """Returns the elements of an eager tensor, without a copy if TensorFlow allows it."""
    tensor = tf.convert_to_tensor(tensor)
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, ValueError, BufferError):
        return np.asarray(tensor)


def _tag(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _number_in_function() -> int:
    """Returns the number of operations so far in the outermost function that is being traced: equal on all ranks."""
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    number = getattr(graph, _COUNTER, 0)
    setattr(graph, _COUNTER, number + 1)
    return number


def as_tensorflow_error(error: Exception) -> tf.errors.OpError:
    """Converts an error of the engine to TensorFlow's; `peer_errors` recognizes it by its text."""
    if isinstance(error, TimedOut):
        text = f"Collective has timed out over shared memory: it waited {error}"
        return tf.errors.DeadlineExceededError(None, None, text)
    if isinstance(error, Mismatch):
        text = f"Shape mismatch in the collective over shared memory: {error}"
        return tf.errors.InvalidArgumentError(None, None, text)
    text = f"Collective over shared memory aborted by: {error} has left. Connection closed by peer"
    return tf.errors.UnavailableError(None, None, text)
