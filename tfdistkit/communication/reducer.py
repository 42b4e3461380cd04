"""The contract of a reducer: what turns the gradients of the replicas into those of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.errors import OptionError, UnsupportedError, explain


class Wire:
    """What a reducer sends tensors by: the replicas, and the collectives between them.

    All replicas call the same methods in the same order. A strategy makes one for its transport.

    Args:
        replicas: The number of replicas.
        replica_id: The number of this one: an int, or a scalar int32 tensor.
        sum_tensors: Returns the sums of this replica's tensors, dense or IndexedSlices, with those of all others.
    """

    def __init__(self, replicas: int, replica_id: Any, sum_tensors: Callable[[list[Any]], list[Any]]):
        self.replicas, self.replica_id, self._sum_tensors = replicas, replica_id, sum_tensors

    def sum(self, tensors: list[Any]) -> list[Any]:
        """Returns the sums over the replicas, the same on all of them.

        Args:
            tensors: Dense tensors, or IndexedSlices, whose rows are concatenated.
        """
        return self._sum_tensors(tensors) if tensors else []

    def sum_as(self, tensors: list[Any], dtype: Any) -> list[Any]:
        """Returns the sums of tensors that travel, and are added, as another dtype.

        Args:
            tensors: As for `sum`.
            dtype: The dtype on the wire; tensors that hold integers keep theirs.
        """
        sent = [cast(tensor, dtype) for tensor in tensors]
        return [cast(total, tensor.dtype) for total, tensor in zip(self.sum(sent), tensors)]

    def adasum(self, tensors: list[Any], dtype: Any = None) -> list[Any]:
        """Returns dense tensors combined by Adasum, which only Horovod over MPI can.

        Args:
            tensors: Dense tensors.
            dtype: The dtype on the wire. Default: their own.

        Raises:
            UnsupportedError: where the transport cannot.
        """
        raise UnsupportedError(
            explain(
                "Adasum needs Horovod over MPI.",
                received=f"{self.replicas} replicas that communicate over TensorFlow",
                do='Use tfdistkit.strategy("horovod", op="adasum"), started with `tfdistkit run --backend mpi`.',
            )
        )


class Reducer:
    """Turns the gradients of the replicas into those of the global batch; this one sums them as they are.

    A subclass overrides `reduce`, and the other two where it keeps state between steps. A reducer belongs to one
    strategy: `tfdistkit.strategy("multiworker", reducer=...)`.
    """

    def build(self, variables: list[Any], make_state: Callable[[Any, str], Any]) -> list[Any] | None:
        """Makes the state; called once for each optimizer, in the scope of the strategy, when it is built.

        Args:
            variables: The Keras variables that the optimizer updates.
            make_state: Called with a variable and a name; returns a new Keras variable of its shape and dtype, zeros,
                which checkpoints and backups save with the variables of the optimizer.

        Returns:
            The state of each variable, in their order: a variable, a list of them, or None. None for no state at all.
        """
        return None

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        """Returns the gradients of the global batch; called in every replica, before clipping and the update.

        Args:
            gradients: This replica's parts, dense or IndexedSlices: their sum over the replicas is the gradient of the
                mean over the rows of the global batch.
            variables: The variable of each gradient; empty in `tfdistkit.global_gradients`, which has only gradients.
            state: What `build` returned for each of these variables; None each where it returned None.
            wire: The collectives.

        Returns:
            One gradient for each, the same on all replicas.
        """
        return wire.sum(gradients)

    def after_apply(self, variables: list[Any], state: list[Any], wire: Wire) -> None:
        """Called in every replica after the optimizer has updated the variables.

        Args:
            variables: As in `reduce`.
            state: As in `reduce`.
            wire: The collectives.
        """

    @property
    def has_state(self) -> bool:
        """Whether it overrides `build`."""
        return type(self).build is not Reducer.build


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


def times(tensor: Any, factor: Any) -> Any:
    """Multiplies a tensor, dense or IndexedSlices, by a number."""
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(times(tensor.values, factor), tensor.indices, tensor.dense_shape)
    return tensor * tf.cast(factor, tensor.dtype)


def cast(tensor: Any, dtype: Any) -> Any:
    """Returns a tensor, dense or IndexedSlices, in another dtype; one that holds no floats as it is."""
    if not tensor.dtype.is_floating:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(tensor.values, dtype), tensor.indices, tensor.dense_shape)
    return tf.cast(tensor, dtype)
