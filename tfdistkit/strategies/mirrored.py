"""`mirrored`: synchronous training on several devices of one process."""

from __future__ import annotations

import tensorflow as tf

from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.communication.reducer import Reducer, needs_processes, require_reducer
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.contract import KerasStrategyMixin
from tfdistkit.strategies.devices import Devices, resolve_devices
from tfdistkit.strategies.prerequisites import require_single_process
from tfdistkit.strategies.sync import collective_keys
from tfdistkit.strategies.sync.replica import ReplicaMixin
from tfdistkit.validation import require_bool


class MirroredExtended(ReplicaMixin, private_api.MirroredExtended):
    """Runs the replicas, one thread each."""


class MirroredStrategy(KerasStrategyMixin, tf.distribute.MirroredStrategy):
    """A `tf.distribute.MirroredStrategy` that is exact under Keras 3."""

    def __init__(self, devices: list[str], reducer: Reducer | None = None):
        self.reducer = reducer or self.reducer
        self._collective_key_base = collective_keys.next_base()  # TensorFlow reads it from the strategy.
        tf.distribute.Strategy.__init__(self, MirroredExtended(self, devices=devices))


def build(
    cluster: ClusterSpec, *, devices: Devices = None, reducer: Reducer | None = None, check_step: bool = True
) -> MirroredStrategy:
    """Makes the strategy `mirrored`.

    Args:
        cluster: Which process this is; it must be the only one.
        devices: Names (`["GPU:0", "GPU:1"]`), or a number: that many GPUs, or on a machine with fewer
            that many logical CPU devices. None takes all GPUs, or the CPU where there are none.
        reducer: Turns the gradients of the replicas into those of the global batch. Default: their sum.
        check_step: Whether the first step of code of your own is compared with one process.

    Returns:
        A `tf.distribute.Strategy` with one replica for each device.

    Raises:
        OptionError: if `devices` are not devices of this machine, or `reducer` is not a `Reducer`.
        TooLateError: if logical devices are needed and TensorFlow has already initialized its devices.
        UnsupportedError: if this process is one of several workers, or `reducer` needs a process for each replica.
    """
    require_single_process("mirrored", cluster)
    names = resolve_devices(devices)
    require_reducer(reducer)
    require_bool("check_step", check_step)
    if reducer is not None and reducer.needs_processes:
        raise needs_processes(f"reducer={reducer.describe()} for the strategy 'mirrored'")
    keras_patches.install()
    strategy = MirroredStrategy(names, reducer)
    strategy.check_step = check_step
    return strategy
