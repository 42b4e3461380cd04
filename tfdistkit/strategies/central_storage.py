"""`central_storage`: one copy of each variable, on one device; all devices compute.

Replicas that share a variable must not read it while one of them writes. In one process all replicas are traced
into one graph, and TensorFlow runs operations on one variable in the order in which they were traced. So it is enough
to trace in the right order: all replicas up to their gradients; then one update, by replica 0, on the device of the
variables; then the rest. The replicas synchronize twice for that while they are traced (`merge_replicas`), which adds
no barrier and no collective to the graph. The update's own branches (gradient accumulation, overwriting by moving
averages, loss scaling) are traced by replica 0 only, without synchronization.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies import keras_patches
from tfdistkit.strategies.contract import KerasStrategyMixin
from tfdistkit.strategies.devices import Devices, resolve_devices, resolve_parameter_device
from tfdistkit.strategies.prerequisites import require_single_process
from tfdistkit.strategies.sync import collective_keys
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.gradients import sparse_lookups
from tfdistkit.strategies.sync.replica import ReplicaMixin, own_tensors
from tfdistkit.strategies.variables import StepVariable
from tfdistkit.validation import require_bool

_LOCAL = threading.local()


class CentralVariable(StepVariable):
    """A variable with one copy that all replicas share.

    What a Keras step assigns to it by itself is the mean of the replicas, weighted by rows, as `Weight` is elsewhere.
    """

    def _get_replica(self, replica_id: int) -> Any:
        return self.values[0]

    @property
    def handle(self) -> Any:
        """The handle of the shared copy, inside and outside of replicas."""
        return self.values[0].handle

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = steps.current()
        if step is not None and step.drops_write():
            return self
        if _one_replica_writes():
            return update_fn(self.values[0], value, **kwargs)

        def merge(strategy: Any, value: Any) -> None:
            self._update_cross_replica(update_fn, _aggregated(strategy, value, self.aggregation), **kwargs)

        if isinstance(value, (int, float)):
            value = tf.constant(value, self.dtype)
        merge_replicas(merge, own_tensors(self._mean_over_rows(value)))
        return self

    def _mean_over_rows(self, value: Any) -> Any:
        is_plain = self.aggregation == tf.VariableAggregation.NONE and self.dtype.is_floating
        if not is_plain or isinstance(value, tf.IndexedSlices):
            return value
        value = self._of_all_rows(value)
        step = self._step_that_writes(value)
        return value if step is None else step.weighted_sum(tf.convert_to_tensor(value, self.dtype))


class _Placement:
    """The device of a new variable, in the form of TensorFlow's `colocate_with`."""

    def __init__(self, device: str):
        self._devices = (device,)


class CentralStorageExtended(ReplicaMixin, private_api.MirroredExtended):
    """Runs the replicas, one thread each, and stores the variables.

    Only state that each replica needs for itself is mirrored: metrics, the state of layers and of random generators.
    """

    def __init__(self, container: tf.distribute.Strategy, devices: list[str], parameter_device: str):
        super().__init__(container, devices=devices)
        self._parameter_device = parameter_device

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device of the variables."""
        return (self._parameter_device,)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if not _is_central(kwargs):
            return super()._create_variable(next_creator, **kwargs)
        kwargs["colocate_with"] = _Placement(self._parameter_device)
        variable = super()._create_variable(next_creator, **kwargs)
        variable.__class__ = CentralVariable
        return variable

    def _use_merge_call(self) -> bool:
        # A replica that updates for all has no peer to wait for, in eager steps either.
        return not _updates_alone() and super()._use_merge_call()

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if not _updates_alone():
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            return value  # All replicas would contribute the same value.
        return tf.nest.map_structure(lambda v: tf.math.scalar_mul(self._num_replicas_in_sync, v), value)

    def _replica_ctx_update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        if not isinstance(var, CentralVariable) or _one_replica_writes():
            return super()._replica_ctx_update(var, fn, args, kwargs, group)

        def merge(strategy: Any, args: Any, kwargs: Any) -> None:
            strategy.extended.update(var, fn, args=args, kwargs=kwargs)

        return merge_replicas(merge, args, kwargs or {})


class CentralStorageStrategy(KerasStrategyMixin, tf.distribute.Strategy):
    """Replaces `tf.distribute.experimental.CentralStorageStrategy`, exact under Keras 3.

    Not a subclass of it: that class runs replicas in another way, and its `experimental_distribute_dataset` fails for
    all `options`.
    """

    def __init__(self, devices: list[str], parameter_device: str):
        self._collective_key_base = collective_keys.next_base()  # TensorFlow reads it from the strategy.
        super().__init__(CentralStorageExtended(self, devices, parameter_device))

    @contextlib.contextmanager
    def optimizer_variables(self) -> Iterator[None]:
        """Creates the variables of an optimizer in this thread centrally: only replica 0 reads and writes them."""
        before = getattr(_LOCAL, "creates_for_optimizer", False)
        _LOCAL.creates_for_optimizer = True
        try:
            yield
        finally:
            _LOCAL.creates_for_optimizer = before

    def apply_summed(
        self, gradients: list[Any], variables: list[Any], optimizer: Any, apply: Callable[[list[Any]], None]
    ) -> None:
        """Sums the gradients on the device of the variables, where replica 0 applies them for all."""
        step = steps.current()
        assert step is not None  # Gradients are summed in a step only.
        summed = merge_replicas(_sum_on_parameter_device, own_tensors(gradients))
        if step.replica_id == 0:
            with tf.device(self.extended.parameter_devices[0]), step.updating_alone():
                apply(summed)
        merge_replicas(_wait)

    def check_jit_compile(self) -> None:
        """Raises:
        UnsupportedError: always. XLA compiles for one device.
        """
        raise UnsupportedError(
            explain(
                "`jit_compile=True` cannot work with several replicas that share their variables: XLA compiles for "
                "one device.",
                received=f"{self.num_replicas_in_sync} replicas under 'central_storage'",
                expected="`jit_compile='auto'` or `jit_compile=False`",
                do="Remove `jit_compile=True` from `model.compile(...)`.",
            )
        )


def merge_replicas(merge: Callable[..., Any], *args: Any) -> Any:
    """Makes the replicas wait for each other while they are traced (in eager steps: while they run).

    Args:
        merge: Called once when all replicas are here: with the strategy, and their `args` as per-replica values.
        args: The values of this replica.

    Returns:
        The result of `merge`, the same for all replicas.

    Raises:
        UnsupportedError: in a branch or a loop, which each replica traces by itself.
    """
    step = steps.current()
    if step is not None and step.is_in_inner_graph():
        raise UnsupportedError(
            explain(
                "A step must not update variables in a branch, in a loop or in a tf.function inside of it, where the "
                "replicas of 'central_storage' cannot wait for each other.",
                received="optimizer.apply(...) or variable.assign(...) there",
                expected="every update in the step itself",
                do='Move the update out of it, or use tfdistkit.strategy("mirrored"), which supports this.',
            )
        )
    return tf.distribute.get_replica_context().merge_call(merge, args=args)


def _wait(strategy: Any) -> None:
    """Does nothing: the replicas only wait for each other."""


def _sum_on_parameter_device(strategy: Any, gradients: list[Any]) -> list[Any]:
    with tf.device(strategy.extended.parameter_devices[0]):
        return [_sum(strategy.experimental_local_results(gradient)) for gradient in gradients]


def _sum(parts: tuple[Any, ...]) -> Any:
    if isinstance(parts[0], tf.IndexedSlices):  # The same order of rows as in one process.
        values, indices = (tf.concat([getattr(p, name) for p in parts], 0) for name in ("values", "indices"))
        total = tf.IndexedSlices(values, indices, parts[0].dense_shape)
        return sparse_lookups.with_rows_added(total, sparse_lookups.lookup_of(parts[0]), len(parts))
    return tf.add_n(parts)


def _aggregated(strategy: Any, value: Any, aggregation: tf.VariableAggregation) -> Any:
    """Combines the replicas' values by the variable's aggregation; without one, takes that of replica 0."""
    if isinstance(value, tf.distribute.DistributedValues):
        for op in tf.distribute.ReduceOp:
            if op.value == aggregation.name:
                return strategy.reduce(op, value, axis=None)
    return strategy.experimental_local_results(value)[0]


def _is_central(created_with: dict[str, Any]) -> bool:
    """Returns whether all replicas share a variable: it is trainable, or belongs to an optimizer."""
    if created_with.get("synchronization") == tf.VariableSynchronization.ON_READ:
        return False
    beside = created_with.get("colocate_with")
    if beside is not None:
        return isinstance(beside, CentralVariable)
    if getattr(_LOCAL, "creates_for_optimizer", False):
        return True
    dtype = created_with.get("dtype")
    if dtype is None and not callable(created_with.get("initial_value")):
        dtype = tf.convert_to_tensor(created_with.get("initial_value")).dtype
    return created_with.get("trainable") is not False and (dtype is None or tf.as_dtype(dtype).is_floating)


def _updates_alone() -> bool:
    step = steps.current()
    return step is not None and step.updates_alone


def _one_replica_writes() -> bool:
    """Returns whether only this replica writes: it applies the gradients for all, or there is one replica."""
    return steps.current() is None or _updates_alone()


def build(
    cluster: ClusterSpec, *, devices: Devices = None, parameter_device: str | None = None, check_step: bool = True
) -> CentralStorageStrategy:
    """Makes the strategy `central_storage`.

    Args:
        cluster: Which process this is; it must be the only one.
        devices: The devices that compute. Names (`["GPU:0", "GPU:1"]`), or a number: that many GPUs, or on a
            machine with fewer that many logical CPU devices. None takes all GPUs, or the CPU where there are none.
        parameter_device: The device that stores trainable variables and the optimizer's state, by name. None takes
            the compute device if there is only one, else the CPU.
        check_step: Whether the first step of code of your own is compared with one process.

    Returns:
        A `tf.distribute.Strategy` with one replica for each of `devices`.

    Raises:
        OptionError: if `devices` or `parameter_device` are not devices of this machine.
        TooLateError: if logical devices are needed and TensorFlow has already initialized its devices.
        UnsupportedError: if this process is one of several workers.
    """
    require_single_process("central_storage", cluster)
    names = resolve_devices(devices)
    storage = resolve_parameter_device(parameter_device, names)
    require_bool("check_step", check_step)
    keras_patches.install()
    strategy = CentralStorageStrategy(names, storage)
    strategy.check_step = check_step
    return strategy
