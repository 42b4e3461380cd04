"""Replaces the collectives of TensorFlow's strategy of several processes by those of a transport of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfdistkit.cluster.spec import TRAINING_ROLES, ClusterSpec
from tfdistkit.errors import DivergenceError, explain
from tfdistkit.keras_adapter import private_api


class Transport(Protocol):
    """What moves tensors between the ranks; a strategy has one as its attribute `transport`.

    Attributes:
        size: The number of ranks.
        rank: This one.
    """

    size: int
    rank: int

    def all_reduce(self, tensors: Sequence[Any], reduce_op: tf.distribute.ReduceOp) -> list[Any]:
        """Sums or averages tensors, dense or IndexedSlices, over the ranks."""

    def all_gather(self, tensor: Any, axis: int = 0) -> tf.Tensor:
        """Concatenates the tensors of all ranks in rank order; their lengths along the axis may differ."""

    def broadcast(self, tensor: Any) -> tf.Tensor:
        """Returns the tensor of rank 0."""


@contextlib.contextmanager
def naming_variable(name: Any, value: tf.Tensor) -> Iterator[None]:
    """Names the variable whose first value the body takes from rank 0, where ranks make variables of other shapes.

    Args:
        name: The name of the variable.
        value: Its value on this rank.

    Raises:
        DivergenceError: for the errors of the transports.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if "ismatch" not in str(error.message):
            raise
        told = str(error.message).strip().splitlines()[0].rpartition("}} ")[-1].rstrip(".")
        raise DivergenceError(
            explain(
                "All ranks must make the same variables, in the same order.",
                received=f"{name!r} of shape {value.shape} and {value.dtype.name} on this rank; {told}",
                do="Make the same model on all ranks: with numbers of units that depend on no rank and on no random "
                "number without a seed, and layers in no order of a set: `sorted(set(columns))`.",
            )
        ) from error


class KnowsItsTask:
    """A base of strategies without TensorFlow's server: tells which task of the job this is, as TensorFlow's does.

    Scripts choose by `strategy.cluster_resolver` who saves, and to which folder.
    """

    _own_task: Any = None

    def join(self, cluster: ClusterSpec) -> None:
        """Sets the task that `cluster_resolver` tells; addresses that are not known are empty."""
        known = {role: list(cluster.addresses[role]) for role in TRAINING_ROLES if role in cluster.addresses}
        spec = tf.train.ClusterSpec(known or {cluster.task.role: [""] * cluster.world_size})
        self._own_task = tf.distribute.cluster_resolver.SimpleClusterResolver(
            spec, task_type=cluster.task.role, task_id=cluster.task.index, rpc_layer="grpc"
        )

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver of TensorFlow for the processes of the job."""
        return super().cluster_resolver if self._own_task is None else self._own_task


class OwnTransport:
    """A base of an extended class after `ReplicaMixin`, of a strategy with a `transport`."""

    def _initialize_local(self, cluster_resolver: Any, devices: Any = None) -> None:
        super()._initialize_local(cluster_resolver, devices=devices)
        self._transport = self._container_strategy().transport
        self._num_workers = self._transport.size
        self._id_in_cluster = self._transport.rank
        self._is_chief = self._id_in_cluster == 0

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        flat = tf.nest.flatten(value)
        return tf.nest.pack_sequence_as(value, self._transport.all_reduce(flat, reduce_op))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        if private_api.is_mirrored(value) and reduce_op == tf.distribute.ReduceOp.MEAN:
            return value
        return self._transport.all_reduce([self._local(value)], reduce_op)[0]

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        return self._transport.all_reduce([self._local(value) for value, _ in value_destination_pairs], reduce_op)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        return self._transport.all_gather(self._local(value), axis)

    def _local(self, value: Any) -> Any:
        return self._container_strategy().experimental_local_results(value)[0]

    def _get_variable_creator_initial_value(self, replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        def value_of_rank_0() -> Any:
            with tf.device(device):
                initial = private_api.initial_value(kwargs["initial_value"])
                value = tf.convert_to_tensor(initial, dtype=kwargs.get("dtype"))
                with naming_variable(kwargs.get("name"), value):
                    return self._transport.broadcast(value)

        return value_of_rank_0
