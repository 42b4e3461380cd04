"""`one_device`: one process on one device, through the same code as the other strategies."""

from __future__ import annotations

import tensorflow as tf

from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import OptionError, explain
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.contract import KerasStrategyMixin
from tfdistkit.strategies.devices import Devices, resolve_devices
from tfdistkit.strategies.prerequisites import require_single_process


class OneDeviceStrategy(KerasStrategyMixin, tf.distribute.OneDeviceStrategy):
    """A `tf.distribute.OneDeviceStrategy` for Keras 3."""


def build(cluster: ClusterSpec, *, devices: Devices = None) -> OneDeviceStrategy:
    """Makes the strategy `one_device`.

    Args:
        cluster: Which process this is; it must be the only one.
        devices: The device's name (`"GPU:0"`), or None for the first GPU; for the CPU if there is no GPU.

    Returns:
        A `tf.distribute.Strategy` with one replica.

    Raises:
        OptionError: if `devices` is not one device of this machine.
        UnsupportedError: if this process is one of several workers.
    """
    require_single_process("one_device", cluster)
    names = resolve_devices(devices)
    if devices is not None and len(names) != 1:
        raise OptionError(
            explain(
                "`devices` must name one device.",
                received=f"devices={devices!r}",
                do='For several devices, use tfdistkit.strategy("mirrored").',
            )
        )
    keras_patches.install()
    return OneDeviceStrategy(names[0])
