"""The base class of all strategies of ours, which the patches of Keras call, with a hook for each difference."""

from __future__ import annotations

import concurrent.futures
import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit.communication import Average, Reducer, Wire
from tfdistkit.communication.checked_sums import checked_sums
from tfdistkit.communication.reducer import needs_processes
from tfdistkit.data.batch_info import add_info
from tfdistkit.data.batch_rows import steps_of_own_data
from tfdistkit.data.dataset_metadata import marks_of
from tfdistkit.data.rows import Split
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api, private_datasets
from tfdistkit.keras_adapter.dataset_tuning import without_idle_tuning
from tfdistkit.strategies.local_steps import layer_state
from tfdistkit.strategies.losses.replica_count import CountsReplicas
from tfdistkit.strategies.step_clock import StepClock
from tfdistkit.strategies.sync import batch_sharding, peer_errors, step
from tfdistkit.strategies.sync.gradients import reducer_state, sparse_gradients, sparse_lookups
from tfdistkit.strategies.variables import of_an_optimizer


class KerasStrategyMixin(CountsReplicas):
    """Adapts one of TensorFlow's `Strategy` classes to Keras 3; placed before it in the list of bases.

    The methods between `sum_gradients` and `check_jit_compile` are hooks. Their defaults are right for replicas that
    run in this process, and a strategy overrides those that differ.

    Attributes:
        check_data: Whether the ranks compare their data (see `strategies.consistency`).
        check_step: Whether train steps of the user's own are compared with one process (see `strategies.step_check`).
        reducer: Turns the gradients of the replicas into those of the global batch.
        process_set: The ranks of Horovod that communicate; None where Horovod does not.
        transport: What `tfdistkit.collectives` communicates over (`collectives.shm`); None for those of TensorFlow.
    """

    # How `private_api.is_ours` knows a strategy of ours.
    is_tfdistkit_strategy = True
    check_data = False
    check_step = True
    reducer: Reducer = Average()
    process_set: Any = None
    transport: Any = None
    _traffic: Any = None

    # A strategy stands for the devices and peers of this process, and what was made in its scope belongs to it alone.
    # So copies of what holds it (callbacks, configurations) hold the same one.
    def __copy__(self) -> KerasStrategyMixin:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasStrategyMixin:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            explain(
                "A strategy cannot be pickled: it stands for the devices and peers of this process.",
                received=f"pickle of {type(self).__name__}",
                expected="a strategy that is made in the process that uses it",
                do="Call tfdistkit.strategy(...) in the other process, or leave the strategy out of what you pickle.",
            )
        )

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        return self._distributed(self.agreed_batches(dataset, "strategy.experimental_distribute_dataset"), options)

    def _distributed(self, dataset: Any, options: Any = None) -> Any:
        if self.num_replicas_in_sync == 1 and isinstance(dataset, tf.data.Dataset):
            # Nothing to split: TensorFlow's distributed iterator would only cost time (1 ms a step).
            return dataset
        if isinstance(dataset, tf.data.Dataset) and private_datasets.batch_size_of(dataset) is None:
            # What tf.data batched lies in memory of its own already, and only there it knows the batch size,
            # by which it cuts a worker's own part.
            dataset = batch_sharding.keep_arrays_safe(dataset)
        steps = self._steps_of_own_data(dataset)
        if steps is None and isinstance(dataset, tf.data.Dataset):
            Split(dataset.element_spec, marks_of(dataset))  # raises what cannot be cut
        if steps is None:
            with batch_sharding.telling_what_has_no_files():
                distributed = super().experimental_distribute_dataset(
                    batch_sharding.split_every_batch(dataset), options
                )
        else:
            distributed = super().distribute_datasets_from_function(lambda _: steps, options)
        if isinstance(dataset, tf.data.Dataset):
            # Facts for the hooks of `fit` that TensorFlow does not provide.
            add_info(distributed, element_spec=dataset.element_spec, is_own_part=self._is_own_part(dataset))
        return distributed

    def wire(self) -> Wire:
        """Returns the collectives of a reducer; called in each replica."""
        own = tf.distribute.get_replica_context().replica_id_in_sync_group
        return Wire(self.num_replicas_in_sync, own, sparse_gradients.sum_over_replicas)

    def sum_gradients(self, gradients: list[Any], variables: list[Any], optimizer: Any) -> list[Any]:
        """Sums the gradients of the replicas by the reducer; called in each of them, before the optimizer sees them.

        Args:
            gradients: This replica's part of each gradient: tensors or IndexedSlices.
            variables: The variable of each; empty if unknown.
            optimizer: The optimizer that will apply them; None if unknown.

        Returns:
            The sums, the same on all replicas.
        """
        reducer = reducer_state.reducer_of(optimizer)
        own, state = step.current(), reducer_state.state_of(reducer, optimizer, variables)

        def reduce(parts: list[Any]) -> list[Any]:
            lookups = [sparse_lookups.lookup_of(part) for part in parts]
            reduced = reducer.reduce(parts, variables, state or [None] * len(parts), self._wire_of_step())
            sums = checked_sums(reducer, reduced, parts)
            if reducer.is_local:  # Each replica keeps its own rows.
                return sums
            replicas = self.num_replicas_in_sync
            return [sparse_lookups.with_rows_added(total, one, replicas) for total, one in zip(sums, lookups)]

        if own is not None and own.traffic is not None:
            own.traffic.count_exact(gradients)
        with contextlib.nullcontext() if own is None else own.summing():
            if reducer.is_local and private_api.may_skip_steps(optimizer):
                raise reducer_state.no_loss_scale(reducer)
            depends = reducer.has_state and not reducer.is_local
            scale = private_api.loss_scale_of(optimizer) if depends else None
            if scale is None:
                return reduce(gradients)
            return reducer_state.reduce_unscaled(gradients, scale, state, reduce)

    def apply_summed(
        self, gradients: list[Any], variables: list[Any], optimizer: Any, apply: Callable[[list[Any]], None]
    ) -> None:
        """Sums the gradients of the replicas and applies them; called in each replica.

        Args:
            gradients: This replica's part of each gradient; none where nothing has a gradient.
            variables: The variable of each.
            optimizer: The optimizer that applies them.
            apply: Updates the variables; called with the sums.
        """
        if not gradients:
            return apply([])
        apply(self.sum_gradients(gradients, variables, optimizer))
        reducer = reducer_state.reducer_of(optimizer)
        own, state = step.current(), reducer_state.state_of(reducer, optimizer, variables)
        with contextlib.nullcontext() if own is None else own.summing():
            reducer.after_apply(variables, state, self._wire_of_step())

    def check_own_reducer(self, reducer: Reducer) -> None:
        """Checks the reducer that an optimizer brings along; called when the optimizer is built.

        Args:
            reducer: That reducer.

        Raises:
            UnsupportedError: if it cannot work here.
        """
        if type(self.reducer) is not Average:
            raise UnsupportedError(
                explain(
                    "The gradients of an optimizer can be reduced in one way: this optimizer brings a reducer along.",
                    received=f"{reducer.describe()}, and a strategy with {self.reducer.describe()}",
                    do="Remove `compression`, `algorithm`, `reducer` or `op` from `tfdistkit.strategy(...)`.",
                )
            )
        self.require_own_processes(reducer)

    def check_optimizer(self, optimizer: Any) -> None:
        """Checks an optimizer before it is built; all ranks call it.

        Args:
            optimizer: The Keras optimizer.
        """

    def check_weights(self, weights: list[Any]) -> None:
        """Compares weights between the ranks before the first update of a loop; all ranks call it."""

    def check_choices(self, reducer: Reducer, variables: list[Any]) -> None:
        """Checks how gradients travel (`Reducer.choices`) before an optimizer is built; all ranks call it.

        Args:
            reducer: The reducer of the gradients.
            variables: The variables of the optimizer.
        """

    def require_own_processes(self, reducer: Reducer) -> None:
        """Requires each replica to have a process of its own, if a reducer needs that.

        Args:
            reducer: The reducer.

        Raises:
            UnsupportedError: if this process has several replicas.
        """
        if reducer.needs_processes and len(self.extended.worker_devices) > 1:
            replicas = f"{len(self.extended.worker_devices)} replicas that share a process"
            raise needs_processes(f"{reducer.describe()}, with {replicas}")

    def _wire_of_step(self) -> Wire:
        wire, own = self.wire(), step.current()
        if own is not None:
            wire.share = own.share()
            wire.rows = wire.rows if own.rows is None else own.rows
            wire.is_local_step = own.is_local
            if own.is_local:
                wire.on_average = layer_state.of_model(own.model).weights_were_averaged
            if own.traffic is not None:
                wire = own.traffic.counted(wire, own)
        return wire

    def optimizer_variables(self) -> contextlib.AbstractContextManager[None]:
        """Marks variables that are created in its body as those of an optimizer."""
        return of_an_optimizer()

    def coordinated_function(self, model: Any, step_function: Any, clock: Any = None) -> Any:
        """Returns what Keras calls for the steps of `fit` and `evaluate`; None for steps that this process runs.

        Args:
            model: The model.
            step_function: Its `train_step` or `test_step`.
            clock: Measures the steps; see `clock`.
        """
        return None

    def clock(self, model: Any) -> Any:
        """Returns the clock that measures the steps of a model (see `StepTimer`)."""
        return StepClock(model)

    def agreed_data(self, dataset: Any, call: str, facts: dict[str, Any]) -> Any:
        """Returns a dataset that all ranks read in one order; all ranks call it, before `data.shard` divides it."""
        return dataset

    def agreed_batches(self, dataset: Any, call: str) -> Any:
        """Returns a dataset that all ranks read in one order; all ranks call it, before a loop of theirs reads it."""
        return dataset

    def agreed_shuffling(self) -> contextlib.AbstractContextManager[None]:
        """Makes every shuffle in its body the same on all ranks."""
        return contextlib.nullcontext()

    def finish_steps(self) -> None:
        """Waits at the end of an epoch for the steps in flight; raises their errors.

        Afterwards all replicas have the same weights. All ranks call it.
        """
        self.settle_weights()

    def settle_weights(self) -> None:
        """Gives all replicas the same weights, where an algorithm let them differ; all ranks call it."""
        for what in self.reducer.unsettled():
            self._settle(what, self.reducer.settle)
        for state in layer_state.unsettled(self):
            self._settle(state, layer_state.LocalLayerState.average, len(state))

    def has_equal_weights(self) -> bool:
        """Returns whether all replicas have the same weights and layer state now; False between two averages."""

        def answer() -> bool:
            return not self.reducer.unsettled() and not layer_state.unsettled(self)

        if tf.executing_eagerly():
            return answer()
        # A loop's function asks while it is traced. In this thread it would watch what is read, which may belong to
        # another model, and fail as soon as that is gone.
        with concurrent.futures.ThreadPoolExecutor(1) as other_thread:
            return other_thread.submit(answer).result()

    def count_settling(self, traffic: Any) -> None:
        """Counts what `settle_weights` sends from now on; all ranks call it.

        Args:
            traffic: The counter (`communication.traffic`); None to stop counting.
        """
        self._traffic = traffic
        self.__dict__.pop("_settling", None)

    def _settle(self, what: Any, settle: Callable[[Any, Wire], Any], size: int = 0) -> None:
        functions = self.__dict__.setdefault("_settling", weakref.WeakKeyDictionary())
        if what not in functions:
            traffic, kept = self._traffic, weakref.ref(what)  # A function must not keep an optimizer alive.

            def wire() -> Wire:
                # Layer state is averaged where weights have been.
                is_sync = not isinstance(kept(), layer_state.LocalLayerState)
                return self.wire() if traffic is None else traffic.counted(self.wire(), None, is_sync)

            # Traced anew when `what` has grown.
            functions[what] = tf.function(lambda _: self.run(lambda: settle(kept(), wire())), autograph=False)
        functions[what](size)

    def settle_steps(self) -> None:
        """Waits for the steps that are in flight before variables are read for a backup.

        Afterwards all replicas have the same weights. All ranks call it.
        """
        self.settle_weights()

    def abandon_steps(self) -> None:
        """Abandons the steps in flight, after an error."""

    def explained_error(self, error: tf.errors.OpError) -> Exception | None:
        """Returns a clearer error for one that a step raised; None if there is none."""
        return peer_errors.explained(error)

    def check_jit_compile(self) -> None:
        """Raises:
        UnsupportedError: if XLA cannot compile the steps of several replicas here.
        """
        device = self.extended.worker_devices[0]
        if "CPU" in device.upper():
            raise UnsupportedError(
                explain(
                    "`jit_compile=True` cannot work with several replicas on CPUs: XLA has no collectives there.",
                    received=f"{self.num_replicas_in_sync} replicas on {device}",
                    expected="`jit_compile='auto'` or `jit_compile=False`",
                    do="Remove `jit_compile=True` from `model.compile(...)`.",
                )
            )

    def distribute_batches(self, dataset: Any) -> Any:
        """As `experimental_distribute_dataset`, for loops that hand each element to `strategy.run` as it is.

        TensorFlow's own iterator asks the other workers before every step whether they still have data, and
        another collective counts the rows. Here every worker knows both, and a step has two collectives less.

        Args:
            dataset: A `tf.data.Dataset` of global batches, the same on all workers.

        Returns:
            Where each process has one replica, a `tf.data.Dataset` whose elements only `strategy.run` takes
            apart; else what `experimental_distribute_dataset` returns.

        Example:
            ```python
            @tf.function
            def train_step(batch):
                return strategy.run(replica_step, args=(batch,))  # def replica_step(batch): x, y = batch; ...

            for batch in strategy.distribute_batches(dataset):
                train_step(batch)
            ```
        """
        dataset = self.agreed_batches(dataset, "strategy.distribute_batches")
        if (
            self.num_replicas_in_sync > 1
            and len(self.extended.worker_devices) == 1
            and batch_sharding.can_split(dataset)
        ):
            return batch_sharding.split(dataset, self.num_replicas_in_sync, self._local_replica_ids())
        return self._distributed(dataset)

    def distribute_keras_batches(self, dataset: Any, sample: Callable[[Any], Any] | None = None) -> Any:
        """As `distribute_batches`, for the steps of Keras, in which a replica without rows has a placeholder row.

        Args:
            dataset: The data of `fit`, `evaluate` or `predict`: global batches, the same on all workers.
            sample: Called with each global batch; what it returns travels with the elements.
        """
        dataset = without_idle_tuning(dataset)
        if self.num_replicas_in_sync == 1 or not batch_sharding.can_split(dataset):
            return self._distributed(dataset)
        own = self._local_replica_ids()
        parts = batch_sharding.split(dataset, self.num_replicas_in_sync, own, batch_sharding.KerasPart, sample)
        if len(own) == 1:
            return parts
        distributed = super().distribute_datasets_from_function(lambda _: parts)
        add_info(distributed, element_spec=dataset.element_spec)
        return distributed

    def _local_replica_ids(self) -> range:
        first = private_api.first_replica_id(self)
        return range(first, first + len(self.extended.worker_devices))

    def _steps_of_own_data(self, dataset: Any) -> tf.data.Dataset | None:
        """Returns a worker's own dataset cut into steps of its replicas; None where TensorFlow cuts it."""
        replicas, devices = self.num_replicas_in_sync, len(self.extended.worker_devices)
        if not isinstance(dataset, tf.data.Dataset) or not self._is_own_part(dataset):
            return None
        batch_size = private_datasets.batch_size_of(dataset)
        return steps_of_own_data(dataset, batch_size, replicas, private_api.first_replica_id(self), devices)

    def _is_own_part(self, dataset: tf.data.Dataset) -> bool:
        """Returns whether each of several workers has its own dataset, which must not be split (`OFF`)."""
        policy = dataset.options().experimental_distribute.auto_shard_policy
        several = self.num_replicas_in_sync > len(self.extended.worker_devices)
        return several and policy == tf.data.experimental.AutoShardPolicy.OFF

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        # Keras reduces scalars, which have no axis 0, along axis 0 (tensorflow#72388).
        if axis == 0 and getattr(value, "shape", None) is not None and tf.TensorShape(value.shape).rank == 0:
            axis = None
        return super().reduce(reduce_op, value, axis)
