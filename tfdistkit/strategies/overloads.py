"""Declares `tfdistkit.strategy(name, **options)` with an overload for each strategy, for type checkers.

Each overload has the names of one strategy and the options of its `build`, so a type checker reports a misspelt name
or an option of another strategy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from tfdistkit.strategies.factory import StrategyName, make

if TYPE_CHECKING:
    import tensorflow as tf

    from tfdistkit.communication import Reducer

# As in `tfdistkit.strategies.devices`, which loads TensorFlow.
Devices = int | str | Sequence[str] | None
Communication = Literal["auto", "shm", "hierarchical", "ring", "nccl"]
Op = Literal["average", "sum", "adasum"]
Compression = Literal["none", "fp16", "bf16"]
ProcessSets = Sequence[int] | Sequence[Sequence[int]] | None


@overload
def strategy(
    name: Literal["auto"] = "auto",
    *,
    # `auto` chooses at run time, so it takes the options of all strategies.
    devices: Devices = ...,
    communication: Communication = ...,
    reducer: Reducer | None = ...,
    fusion_bytes: int = ...,
    variable_partitioner: None = ...,
    max_inflight_per_worker: int = ...,
    heartbeat_timeout_s: float = ...,
    synchronous: Literal[False] = ...,
    op: Op = ...,
    compression: Compression | Reducer = ...,
    algorithm: Reducer | None = ...,
    sparse_as_dense: bool = ...,
    process_set: ProcessSets = ...,
    fusion_threshold_bytes: int | None = ...,
    cycle_time_ms: float | None = ...,
    hierarchical: bool | None = ...,
    timeline: str | os.PathLike[str] | None = ...,
    autotune: bool | None = ...,
    timeout_s: float | None = ...,
    check_data: bool = ...,
    check_step: bool = ...,
) -> tf.distribute.Strategy: ...


@overload
def strategy(name: Literal["one_device", "off"], *, devices: Devices = ...) -> tf.distribute.Strategy: ...


@overload
def strategy(
    name: Literal["mirrored", "dp"],
    *,
    devices: Devices = ...,
    reducer: Reducer | None = ...,
    check_step: bool = ...,
) -> tf.distribute.Strategy: ...


@overload
def strategy(
    name: Literal["central_storage", "central"],
    *,
    devices: Devices = ...,
    parameter_device: str | None = ...,
    check_step: bool = ...,
) -> tf.distribute.Strategy: ...


@overload
def strategy(
    name: Literal["multiworker", "multi_worker", "multi_worker_mirrored", "ddp"],
    *,
    communication: Communication = ...,
    compression: Compression | Reducer = ...,
    algorithm: Reducer | None = ...,
    reducer: Reducer | None = ...,
    fusion_bytes: int = ...,
    timeout_s: float = ...,
    check_data: bool = ...,
    check_step: bool = ...,
) -> tf.distribute.Strategy: ...


@overload
def strategy(
    name: Literal["parameter_server", "ps"],
    *,
    variable_partitioner: None = ...,
    max_inflight_per_worker: int = ...,
    timeout_s: float = ...,
    heartbeat_timeout_s: float = ...,
    synchronous: Literal[False] = ...,
) -> tf.distribute.Strategy: ...


@overload
def strategy(
    name: Literal["horovod"],
    *,
    op: Op = ...,
    compression: Compression | Reducer = ...,
    algorithm: Reducer | None = ...,
    sparse_as_dense: bool = ...,
    reducer: Reducer | None = ...,
    process_set: ProcessSets = ...,
    fusion_threshold_bytes: int | None = ...,
    cycle_time_ms: float | None = ...,
    hierarchical: bool | None = ...,
    timeline: str | os.PathLike[str] | None = ...,
    autotune: bool | None = ...,
    timeout_s: float | None = ...,
    check_data: bool = ...,
    check_step: bool = ...,
) -> tf.distribute.Strategy: ...


@overload
def strategy(name: StrategyName, **options: Any) -> tf.distribute.Strategy: ...


def strategy(name: str = "auto", **options: Any) -> tf.distribute.Strategy:
    """Makes a strategy. Call it before the script uses TensorFlow.

    The batch size of the script is the global batch size: N workers compute what one worker computes on it.

    Args:
        name: `"auto"`, `"one_device"`, `"mirrored"` (the devices of this process), `"central_storage"`
            (the same, with each variable on one device only), `"multiworker"`
            (several processes, started by `tfdistkit run`, `srun` or anything that sets TF_CONFIG), `"horovod"`
            (several processes that communicate over Horovod), `"parameter_server"` (workers that share the
            variables on servers), or a registered name. `"auto"` chooses `parameter_server` when there are
            servers, `multiworker` when there are other workers (`horovod` when
            `horovodrun`, `mpirun` or `tfdistkit run --backend horovod` started them), else `mirrored` when
            there are two GPUs or more, else `one_device`. The spellings of TensorFlow's Model
            Garden (`off`, `multi_worker_mirrored`) and of Lightning (`dp`, `ddp`) also work.
        **options: The options of that strategy, as listed on its page in the docs. `"auto"` takes the options of every
            strategy that it may choose, and ignores those that the chosen one does not have.

    Returns:
        A `tf.distribute.Strategy`; build and compile the model in its `scope()`.

    Raises:
        OptionError: (a ValueError) if the name or an option is unknown or wrong.
        ClusterConfigError: (a ValueError) if TF_CONFIG is wrong.
        TooLateError: (a RuntimeError) if TensorFlow has already initialized its devices.
        UnsupportedError: (a RuntimeError) if the strategy does not use the cluster's parameter servers.
        RendezvousError: (a TimeoutError) if a worker is missing after `timeout_s`.
        MissingDependencyError: (an ImportError) if TensorFlow or Keras 3 is not installed.

    Example:
        ```python
        strategy = tfdistkit.strategy("multiworker")
        with strategy.scope():
            model = build_model()
            model.compile(optimizer="adam", loss="mse")
        model.fit(dataset)
        ```
    """
    return make(name, options)
