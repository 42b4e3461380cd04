"""Resolves the devices of a strategy, and assigns GPUs to the workers of a host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import tensorflow as tf

from tfdistkit import env
from tfdistkit.cluster.environments import slurm
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import OptionError, TooLateError, UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.validation import is_integer, require_integer

Devices = int | str | Sequence[str] | None

_LOG = logging.getLogger(__name__)


def resolve_devices(devices: Devices) -> list[str]:
    """Turns the `devices` of a strategy into device names.

    Args:
        devices: Names (`["GPU:0", "GPU:1"]`), one name, a number (that many GPUs; on a machine with
            fewer, that many logical CPU devices, and a log line says so), or None for all GPUs, or for
            the CPU where there are none.

    Returns:
        Device names such as `GPU:0`.

    Raises:
        OptionError: if a name or the number is wrong, or this machine does not have a device.
        TooLateError: if logical devices are needed and TensorFlow has already initialized its devices.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if devices is None:
        return [f"GPU:{i}" for i in range(len(gpus))] or ["CPU:0"]
    if isinstance(devices, str):
        devices = [devices]
    if not is_integer(devices) and not isinstance(devices, Sequence):
        raise OptionError(
            explain(
                "`devices` must be names of devices or a number of devices.",
                received=f"devices={devices!r}",
                expected="['GPU:0', 'GPU:1'], or 2",
            )
        )
    if not isinstance(devices, Sequence):
        count = require_integer("devices", devices)
        return [f"GPU:{i}" for i in range(count)] if len(gpus) >= count else _logical_cpus(count, len(gpus))
    return _checked_names(list(devices), "devices", devices)


def resolve_parameter_device(name: str | None, compute_devices: list[str]) -> str:
    """Turns the `parameter_device` of a strategy into a device name.

    Args:
        name: One name, or None for TensorFlow's default: the compute device if there is only one, else the CPU.
        compute_devices: The devices that compute.

    Returns:
        A device name such as `CPU:0`.

    Raises:
        OptionError: if it is not the name of a device of this machine.
    """
    if name is None:
        return compute_devices[0] if len(compute_devices) == 1 else "CPU:0"
    return _checked_names([name], "parameter_device", name)[0]


def _logical_cpus(number: int, gpus: int) -> list[str]:
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    if len(configured) < number:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
        except RuntimeError:
            raise TooLateError(too_late(f"devices={number}")) from None
    _LOG.warning("devices=%d with %d GPUs on this machine: using %d logical CPU devices.", number, gpus, number)
    return [f"CPU:{i}" for i in range(number)]


def _checked_names(names: list[str], option: str, given: object) -> list[str]:
    received = f"{option}={given!r}"
    if not names or not all(isinstance(name, str) for name in names):
        raise OptionError(
            explain(f"`{option}` must be device names.", received=received, expected="names such as 'GPU:0'")
        )
    try:
        specs = [tf.DeviceSpec.from_string(n if n.startswith("/") else f"/device:{n.upper()}") for n in names]
    except ValueError:
        specs = []
    short = [f"{s.device_type}:{s.device_index}" for s in specs if s.device_type and s.device_index is not None]
    if len(short) != len(names):
        raise OptionError(
            explain(
                f"`{option}` must hold device names only.",
                received=received,
                expected="names such as 'GPU:0' or 'CPU:0'",
            )
        )
    if len(set(short)) != len(short):
        raise OptionError(explain(f"`{option}` must name each device once.", received=received))
    present = [f"{kind}:{i}" for kind in ("CPU", "GPU") for i in range(_number_of(kind))]
    missing = [name for name in short if name not in present]
    if missing:
        raise OptionError(
            explain(
                f"`{option}` must name devices of this machine, which has no {missing[0]}.",
                received=received,
                expected=f"some of: {', '.join(present)}",
            )
        )
    return short


def _number_of(kind: str) -> int:
    """Returns the number of logical devices of a kind without initializing them."""
    devices = tf.config.list_physical_devices(kind)
    return sum(len(tf.config.get_logical_device_configuration(device) or [None]) for device in devices)


def take_gpu_of_local_rank(cluster: ClusterSpec) -> None:
    """Makes only the GPU of its local rank visible to this process, where several workers share a host.

    Raises:
        UnsupportedError: if the host has GPUs, but fewer than workers.
        TooLateError: if TensorFlow has already initialized its devices.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if cluster.local_world_size == 1 or not gpus:
        return
    visible = env.text("CUDA_VISIBLE_DEVICES") or ""
    if len(gpus) == 1 and visible and "," not in visible:
        return  # The scheduler gave this process its one GPU.
    gpu = cluster.local_rank
    of_step = slurm.gpus_of_step_here()
    if of_step is not None and len(gpus) < of_step:
        gpu = 0  # SLURM gave each task its own GPUs (`--gpus-per-task`); those of its peers are hidden.
    elif len(gpus) < cluster.local_world_size:
        raise UnsupportedError(
            explain(
                "This host has fewer GPUs than workers.",
                received=f"{cluster.local_world_size} workers and {len(gpus)} GPUs",
                expected="at least one GPU for each worker",
                do=f"Start {len(gpus)} workers, or set CUDA_VISIBLE_DEVICES=-1 to train on the CPU.",
            )
        )
    try:
        tf.config.set_visible_devices(gpus[gpu], "GPU")
    except RuntimeError:
        raise TooLateError(too_late(f"local_rank={cluster.local_rank}")) from None


def require_not_started(received: str) -> None:
    """Raises:
    TooLateError: if TensorFlow has already initialized its devices.
    """
    if private_api.tensorflow_has_started():
        raise TooLateError(too_late(received))


def too_late(received: str) -> str:
    """Returns the error message for a strategy that is made after the first TensorFlow operation."""
    return explain(
        "The strategy must be made before the first TensorFlow operation of this process, which initializes devices.",
        received=received,
        expected="`tfdistkit.strategy(...)` before any tensor, variable, dataset or model",
        do="Move the line `strategy = tfdistkit.strategy(...)` to the top of the script, right after the imports.",
    )
