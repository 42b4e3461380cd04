"""`multiworker`: synchronous training of one model by several processes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.strategies import keras_seams
from tfdistkit.strategies.replica import KerasStrategyMixin, ReplicaMixin


class MultiWorkerExtended(ReplicaMixin, keras_seams.CollectiveAllReduceExtended):
    """What runs the replica of this process and talks to the others."""


class MultiWorkerStrategy(KerasStrategyMixin, tf.distribute.MultiWorkerMirroredStrategy):
    """`tf.distribute.MultiWorkerMirroredStrategy` that works with Keras 3, and is exact."""

    def __init__(self, resolver: Any, communication_options: Any):
        extended = MultiWorkerExtended(
            self, cluster_resolver=resolver, communication_options=communication_options
        )
        tf.distribute.Strategy.__init__(self, extended)


def build(cluster: ClusterSpec, *, communication: str = "auto", timeout_s: float = 300.0) -> tf.distribute.Strategy:
    keras_seams.install()
    implementation = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation[communication.upper()], timeout_seconds=timeout_s)
    if cluster.world_size == 1:
        spec = tf.train.ClusterSpec({})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec)
    else:
        spec = tf.train.ClusterSpec({role: list(cluster.addresses[role]) for role in ("chief", "worker") if role in cluster.addresses})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type=cluster.task.role, task_id=cluster.task.index, rpc_layer="grpc",
           num_accelerators={"GPU": len(tf.config.list_physical_devices("GPU"))})
        keras_seams.configure_coordination(spec, timeout_s)
    return MultiWorkerStrategy(resolver, options)
