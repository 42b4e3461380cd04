"""The contract of a reducer, which turns the gradients of the replicas into those of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdistkit.communication.buckets import FIRST_BYTES, buckets
from tfdistkit.errors import OptionError, UnsupportedError, explain


class Wire:
    """The collectives by which a reducer sends tensors between the replicas.

    All replicas call the same methods in the same order. A strategy makes one for its transport.

    Args:
        replicas: The number of replicas.
        replica_id: The number of this replica: an int, or a scalar int32 tensor.
        sum_tensors: Returns the sums of tensors, dense or IndexedSlices, over all replicas.

    Attributes:
        rows: The rows of this replica in this step, a scalar float32 tensor; 1.0 if no tensor has rows.
        share: Their share of the rows that the step trains on, a scalar tensor or a float; 1.0 in a local step.
        is_local_step: Whether the step trains on the rows of this replica alone (`Reducer.trains_alone`).
        on_average: A reducer calls it in a local step after it has averaged the weights; layer state is averaged then.
        fusion_bytes: The maximum size of one fused operation, in bytes; None for no limit.
        first_bytes: The maximum size of the fused operation that is sent first, in bytes.
    """

    def __init__(self, replicas: int, replica_id: Any, sum_tensors: Callable[[list[Any]], list[Any]]):
        self.replicas, self.replica_id, self._sum_tensors = replicas, replica_id, sum_tensors
        self.rows: Any = 1.0
        self.share: Any = 1.0 / replicas
        self.is_local_step = False
        self.on_average: Callable[[], None] = lambda: None
        self.fusion_bytes: int | None = None
        self.first_bytes = FIRST_BYTES

    def sum(self, tensors: list[Any]) -> list[Any]:
        """Returns the sums over the replicas, the same on all of them.

        Args:
            tensors: Dense tensors, or IndexedSlices, whose rows are concatenated.
        """
        sums: dict[int, Any] = {}
        for bucket in buckets(tensors, self.fusion_bytes, self.first_bytes):
            sums.update(zip(bucket, self._sum_tensors([tensors[i] for i in bucket])))
        return [sums[i] for i in range(len(tensors))]

    def sum_as(self, tensors: list[Any], dtype: Any) -> list[Any]:
        """Returns the sums of tensors that are sent, and added, in another dtype.

        Args:
            tensors: As for `sum`.
            dtype: The dtype on the wire; tensors that hold integers keep theirs, and so do IndexedSlices with
                bfloat16, whose rows TensorFlow and Horovod cannot gather.
        """
        kept = [dtype == tf.bfloat16 and isinstance(tensor, tf.IndexedSlices) for tensor in tensors]
        sent = [tensor if keeps else cast(tensor, dtype) for tensor, keeps in zip(tensors, kept)]
        return [cast(total, tensor.dtype) for total, tensor in zip(self.sum(sent), tensors)]

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensors of all replicas, stacked in their order; for data that cannot be summed, such as bytes.

        Args:
            tensor: A dense tensor, of the same dtype and static shape on all replicas.

        Raises:
            UnsupportedError: if replicas share a process: there a gather would save no bytes.
        """
        raise needs_processes(f"{self.replicas} replicas that share a process")

    def exchange(self, rows: tf.Tensor) -> tf.Tensor:
        """Sends row i to replica i, and returns the rows that the replicas sent to this one, in their order.

        Args:
            rows: A row for each replica, of the same dtype and static shape on all replicas.

        Raises:
            UnsupportedError: as `gather`.
        """
        raise needs_processes(f"{self.replicas} replicas that share a process")

    def swap(self, data: tf.Tensor, partner: tf.Tensor) -> tf.Tensor:
        """Exchanges bytes with one other replica; each replica sends only its own bytes.

        Args:
            data: A uint8 vector, of the same static length on all replicas.
            partner: The number of the other replica, a scalar int32 tensor; that replica passes the number of this one.
                A replica that passes its own number gets its own bytes.

        Raises:
            UnsupportedError: as `gather`.
        """
        raise needs_processes(f"{self.replicas} replicas that share a process")

    def background(self) -> Background:
        """Returns an object that sums arrays in a thread while steps run.

        Raises:
            UnsupportedError: if the transport cannot.
        """
        raise UnsupportedError(
            explain(
                "AsyncModelAverage needs shared memory or Horovod: TensorFlow's ring takes collectives of one thread.",
                received=f"{self.replicas} replicas that communicate over TensorFlow",
                do='Start all workers on one host, use tfdistkit.strategy("horovod"), or average by LocalSGD.',
            )
        )

    def within_host(self) -> Wire:
        """Returns the collectives between the replicas of this host.

        Raises:
            UnsupportedError: if the hosts have no collectives of their own.
        """
        raise needs_hosts(f"{self.replicas} replicas that are not divided into hosts")

    def across_hosts(self) -> Wire:
        """Returns the collectives between the hosts, for tensors that are equal on the replicas of a host.

        Each host counts as one replica.

        Raises:
            UnsupportedError: as `within_host`.
        """
        raise needs_hosts(f"{self.replicas} replicas that are not divided into hosts")

    def adasum(self, tensors: list[Any], dtype: Any = None) -> list[Any]:
        """Returns dense tensors combined by Adasum, which only Horovod over MPI can.

        Args:
            tensors: Dense tensors.
            dtype: The dtype on the wire. Default: their own.

        Raises:
            UnsupportedError: if the transport cannot.
        """
        raise UnsupportedError(
            explain(
                "Adasum needs Horovod over MPI.",
                received=f"{self.replicas} replicas that communicate over TensorFlow",
                do='Use tfdistkit.strategy("horovod", op="adasum"), started with `tfdistkit run --backend mpi`.',
            )
        )


class Background(Protocol):
    """Sums arrays of the replicas in threads, beside the collectives of the steps.

    Attributes:
        timeout_s: Seconds that a caller waits for a sum, and so for its peers.
    """

    timeout_s: float

    def sum(self, name: str, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Returns the sums over the replicas; waits for the peers as long as they are alive.

        Args:
            name: Identifies the sum among those in flight; the same on all replicas.
            arrays: Arrays of float32 or float64, of one dtype, and of the same shapes on all replicas.
        """

    def interrupt(self) -> None:
        """Ends all sums with an error, when this process exits."""


# Called as make_state(variable, name, shape=None, dtype=None, initializer="zeros", of_replica=False, saved=True).
MakeState = Callable[..., Any]


class Reducer:
    """Turns the gradients of the replicas into those of the global batch; this one sums them as they are.

    A subclass overrides `reduce`, and `build` and `after_apply` if it keeps state between steps. A reducer belongs to
    one strategy: `tfdistkit.strategy("multiworker", reducer=...)`.

    Attributes:
        needs_processes: Whether it needs `Wire.gather` or `Wire.exchange`, so replicas in processes of their own.
        needs_hosts: Whether it needs `Wire.within_host` and `Wire.across_hosts`, so ranks on several hosts.
        is_local: Whether the weights of the replicas may differ between two calls of `settle`.
        replaces_optimizer: Whether it does a part of the optimizer's work, such as momentum. A job of one
            replica, which calls no reducer, would lack that part.
    """

    needs_processes = False
    needs_hosts = False
    replaces_optimizer = False
    is_local = False

    def check_optimizer(self, optimizer: Any) -> None:
        """Checks an optimizer; called when it is built, before `build`.

        Args:
            optimizer: The Keras optimizer.

        Raises:
            UnsupportedError: if the two cannot be used together.
        """

    def build(self, variables: list[Any], make_state: MakeState) -> list[Any] | None:
        """Makes the state; called once for each optimizer, in the scope of the strategy, when it is built.

        Args:
            variables: The Keras variables that the optimizer updates.
            make_state: Called with a variable and a name; returns a new Keras variable of its shape and dtype, zeros,
                which checkpoints and backups save with the variables of the optimizer. With `shape`, `dtype` and
                `initializer` it has those; with `saved=False` only backups save it. With `of_replica=True` each
                replica has a value of its own (such as what it has not sent yet), which checkpoints do not save: a
                backup holds all values, and a job with another number of replicas resumes with their sum.

        Returns:
            The state of each variable, in their order: a variable, a list of them, or None. None if it has no state.
        """
        return None

    def choices(self, variables: list[Any]) -> list[str]:
        """Returns a text for each variable that tells how its gradient travels.

        Ranks compare the texts when an optimizer is built, and fail if one differs. A reducer that treats variables
        differently overrides it.

        Args:
            variables: The Keras variables that the optimizer updates.
        """
        return [self.describe()] * len(variables)

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        """Returns the gradients of the global batch; called in every replica, before clipping and the update.

        Args:
            gradients: This replica's parts, dense or IndexedSlices: their sum over the replicas is the gradient of the
                mean over the rows of the global batch.
            variables: The variable of each gradient; empty in `tfdistkit.global_gradients`, which has only gradients.
            state: The result of `build` for each of these variables; None for each if it returned None.
            wire: The collectives.

        Returns:
            One gradient for each variable, the same on all replicas.
        """
        return wire.sum(gradients)

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        """Updates the state; called in every replica after the optimizer has updated the variables.

        Args:
            variables: As in `reduce`.
            state: As in `reduce`.
            wire: The collectives.
        """

    def own_slots(self, optimizer: Any) -> list[Any]:
        """Returns the optimizer variables of which each replica keeps a value of its own, also after `settle`.

        A backup holds all values, and a job with another number of replicas resumes with their mean.

        Args:
            optimizer: A Keras optimizer that is built.
        """
        return []

    def trains_alone(self) -> bool:
        """Returns whether the next Keras steps are local; called outside of replicas before each execution.

        In a local step only the reducer communicates. Losses are means over the rows of this replica, and `reduce`
        receives their gradients. Layer state is this replica's own until `Wire.on_average` is called; metrics and logs
        are until the end of an epoch. All ranks must return the same.
        """
        return False

    def unsettled(self) -> list[Any]:
        """Returns objects for `settle` whose weights may differ between replicas now; called outside of replicas."""
        return []

    def settle(self, what: Any, wire: Wire) -> None:
        """Gives all replicas the same weights; called in every replica.

        Args:
            what: One of the objects that `unsettled` returned.
            wire: The collectives.
        """

    def describe(self) -> str:
        """Returns a text with all settings of the reducer; the start fails if it differs between ranks."""
        return type(self).__name__

    def __repr__(self) -> str:
        return self.describe()

    @property
    def has_state(self) -> bool:
        """Whether the reducer keeps state: whether it overrides `build`."""
        return type(self).build is not Reducer.build


def own_reducer(optimizer: Any) -> Reducer | None:
    """Returns the reducer of an optimizer that has its own, in its attribute `reducer`; else None.

    Args:
        optimizer: A Keras optimizer, or a `LossScaleOptimizer` around one; may be None.
    """
    own = getattr(getattr(optimizer, "inner_optimizer", optimizer), "reducer", None)
    return own if isinstance(own, Reducer) else None


def require_reducer(reducer: Any) -> None:
    """Requires an object with the methods of a reducer, or None.

    Raises:
        OptionError: for anything else, such as a class or a name.
    """
    if reducer is not None and not isinstance(reducer, Reducer):
        raise OptionError(
            explain(
                "`reducer` must be a tfdistkit.communication.Reducer.",
                received=f"reducer={reducer!r}",
                expected="an object of a subclass, such as tfdistkit.communication.FP16()",
            )
        )


def needs_processes(received: str) -> UnsupportedError:
    """Returns the error for a reducer whose replicas share a process.

    Args:
        received: What asked for it.
    """
    return UnsupportedError(
        explain(
            "This compression needs replicas in processes of their own.",
            received=received,
            do='Use tfdistkit.strategy("multiworker"), or leave the compression out: within a process nothing is sent.',
        )
    )


def needs_hosts(received: str) -> UnsupportedError:
    """Returns the error for a reducer that needs to know the hosts of the ranks, where they are unknown.

    Args:
        received: What asked for it.
    """
    return UnsupportedError(
        explain(
            "Hierarchical needs the strategy 'multiworker' on CPUs of several Linux hosts: the ranks of a host sum "
            "through its memory.",
            received=received,
            expected='tfdistkit.strategy("multiworker", algorithm=...) with communication="auto" or "hierarchical"',
            do="Use that, or algorithm=tfdistkit.algorithms.LocalSGD(50), which averages all workers.",
        )
    )


def times(tensor: Any, factor: Any) -> Any:
    """Multiplies a tensor, dense or IndexedSlices, by a number."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(times(tensor.values, factor), tensor.indices, tensor.dense_shape)
    return tensor * tf.cast(factor, tensor.dtype)


def cast(tensor: Any, dtype: Any) -> Any:
    """Casts a tensor, dense or IndexedSlices, of floating-point numbers; returns other tensors unchanged."""
    if not tensor.dtype.is_floating:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(tensor.values, dtype), tensor.indices, tensor.dense_shape)
    return tf.cast(tensor, dtype)
