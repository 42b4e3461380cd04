"""`mirrored`: synchronous training on several devices of one process."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.strategies import keras_seams
from tfdistkit.strategies.replica import KerasStrategyMixin, ReplicaMixin


class MirroredExtended(ReplicaMixin, keras_seams.MirroredExtended):
    """What runs the replicas, one thread each."""


class MirroredStrategy(KerasStrategyMixin, tf.distribute.MirroredStrategy):
    """`tf.distribute.MirroredStrategy` that is exact under Keras 3."""

    def __init__(self, devices: Any):
        tf.distribute.Strategy.__init__(self, MirroredExtended(self, devices=devices))


def build(cluster: ClusterSpec, *, devices: Any = None) -> tf.distribute.Strategy:
    keras_seams.install()
    return MirroredStrategy(devices)
