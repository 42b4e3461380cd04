"""How a strategy of ours runs its replicas. Shared by all of them; the transport stays TensorFlow's.

TensorFlow runs each replica in a thread and lets them meet in `merge_call`, which cannot happen inside a
branch or a loop: gradient accumulation, EMA overwriting and loss scaling fail under it (keras#20582).
Here every replica stays in replica context and communicates with collectives, which can stand anywhere
in a graph. A process with one device needs no thread at all: its replica runs inline.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistkit import env
from tfdistkit.cluster.spec import ClusterSpec
from tfdistkit.data.batch_rows import steps_of_own_data
from tfdistkit.data.marks import marks_of
from tfdistkit.data.rows import Split
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.strategies import batch_parts, keras_seams, stand_ins, step
from tfdistkit.strategies.dataset_tuning import without_idle_tuning
from tfdistkit.strategies.endless_sums import sum_that_ends

# What TensorFlow's all-gather cannot carry, and what carries it. Strings have no carrier.
_GATHER_AS = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


class ReplicaMixin:
    """Goes in front of one of TensorFlow's `StrategyExtended` classes."""

    def _use_merge_call(self) -> bool:
        # Eager replicas run one after the other, so a collective of the first would wait for the second
        # for ever: there, and only with several devices, they meet in merge_call.
        return len(self.worker_devices) > 1 and tf.executing_eagerly()

    @tf.autograph.experimental.do_not_convert
    def _call_for_each_replica(self, fn: Any, args: tuple, kwargs: dict | None) -> Any:
        kwargs = kwargs or {}
        if keras_seams.is_tf_function(fn):
            return self._lifted(fn)(*args, **kwargs)
        if len(self.worker_devices) == 1:
            return self._run_inline(fn, args, kwargs)
        return super()._call_for_each_replica(self._in_step(fn, args, kwargs), args, kwargs)

    def _lifted(self, fn: Any) -> Any:
        """Returns a tf.function that runs the replicas inside, for one that the user gave to `strategy.run`.

        So each replica's rows are counted inside the graph in which they are used.
        """
        cache = self.__dict__.setdefault("_lifted_functions", weakref.WeakKeyDictionary())
        if fn not in cache:
            inner = keras_seams.converted_python_function(fn)

            @tf.autograph.experimental.do_not_convert
            def lifted(*args: Any, **kwargs: Any) -> Any:
                return self._call_for_each_replica(inner, args, kwargs)

            cache[fn] = keras_seams.clone_tf_function(fn, lifted)
        return cache[fn]

    def _run_inline(self, fn: Any, args: tuple, kwargs: dict) -> Any:
        args, kwargs = keras_seams.select_replica(0, (args, kwargs))
        with (
            tf.device(self.worker_devices[0]),
            tf.distribute.ReplicaContext(
                self._container_strategy(), replica_id_in_sync_group=self._get_replica_id_in_sync_group(0)
            ),
        ):
            return self._run_step(fn, args, kwargs, step.is_predicting())

    def _in_step(self, fn: Any, args: tuple, kwargs: dict) -> Any:
        """Wraps what a replica thread runs so that it knows its rows."""
        total = self._sum_of_local_rows(args, kwargs)
        is_of_batch = [isinstance(value, tf.distribute.DistributedValues) for value in tf.nest.flatten((args, kwargs))]
        is_predicting = step.is_predicting()

        @tf.autograph.experimental.do_not_convert
        def in_step(*args: Any, **kwargs: Any) -> Any:
            return self._run_step(fn, args, kwargs, is_predicting, total, is_of_batch)

        return in_step

    def _run_step(
        self,
        fn: Any,
        args: tuple,
        kwargs: dict,
        is_predicting: bool,
        total: tf.Tensor | None = None,
        is_of_batch: list[bool] | None = None,
    ) -> Any:
        """Runs what the user gave to `strategy.run` on one replica."""
        args, part = batch_parts.unwrap(args)
        own = self._make_step(args, kwargs, part, total, is_of_batch)
        is_empty = tf.equal(own.rows, 0) if is_predicting and own is not None and own.may_be_empty else None
        if is_empty is not None and part is None:
            args = stand_ins.with_stand_in(args, is_empty)
        with step.running(own):
            outputs = fn(*stand_ins.hide_emptiness(args), **stand_ins.hide_emptiness(kwargs))
        return outputs if is_empty is None else stand_ins.without_stand_in(outputs, is_empty)

    def _sum_of_local_rows(self, args: tuple, kwargs: dict) -> tf.Tensor | None:
        """All replicas' rows where all of them live in this process, so that nothing has to be communicated."""
        if self._num_replicas_in_sync != len(self.worker_devices):
            return None
        of_replicas = [keras_seams.select_replica(i, (args, kwargs)) for i in range(len(self.worker_devices))]
        part = batch_parts.unwrap(of_replicas[0][0])[1]
        if part is not None:
            return part.total_rows
        is_of_batch = [isinstance(value, tf.distribute.DistributedValues) for value in tf.nest.flatten((args, kwargs))]
        rows = [step.count_rows(values, is_of_batch)[0] for values in of_replicas]
        return None if any(r is None for r in rows) else tf.add_n(rows)

    def _make_step(
        self,
        args: tuple,
        kwargs: dict,
        part: batch_parts.BatchPart | None,
        total: tf.Tensor | None,
        is_of_batch: list[bool] | None,
    ) -> step.ReplicaStep | None:
        replicas = self._num_replicas_in_sync
        if replicas == 1:
            return None
        rows, static_rows = step.count_rows((args, kwargs), is_of_batch)
        context = tf.distribute.get_replica_context()
        if part is not None:
            rows, total = part.rows, part.total_rows

        def sum_rows(own: step.ReplicaStep) -> tf.Tensor:
            return total if total is not None else context.all_reduce(tf.distribute.ReduceOp.SUM, own.rows)

        own = step.ReplicaStep(rows, sum_rows, replicas, keras_seams.replica_id(context), static_rows)
        own.has_stand_in = isinstance(part, batch_parts.KerasPart)
        if part is None:
            own.check_rows = lambda: step.same_rows((args, kwargs), is_of_batch)
        return own

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if self._num_replicas_in_sync == 1:
            return value
        reduce = functools.partial(super()._replica_ctx_all_reduce, reduce_op, options=options)
        return reduce(value) if len(self.worker_devices) == 1 else sum_that_ends(reduce, value)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return super()._reduce_to(reduce_op, self._per_replica(value), destinations, options)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        pairs = [(self._per_replica(value), destination) for value, destination in value_destination_pairs]
        return super()._batch_reduce_to(reduce_op, pairs, options)

    def _per_replica(self, value: Any) -> Any:
        """Returns one tensor for each replica where TensorFlow has made a single value of one that all of them gave.

        It does so with what is the same object in all replicas, and then counts it once, or refuses to sum it.
        """
        if len(self.worker_devices) == 1 or not isinstance(value, (tf.Tensor, tf.IndexedSlices)):
            return value
        copies = []
        for device in self.worker_devices:
            with tf.device(device):
                copies.append(tf.nest.map_structure(tf.identity, value, expand_composites=True))
        return keras_seams.regroup(copies)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        return keras_seams.as_own_variable(super()._create_variable(next_creator, **kwargs), kwargs)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        local = self._container_strategy().experimental_local_results(value)
        dtype = local[0].dtype
        carrier = _GATHER_AS.get(dtype)
        gather = super()._gather_to_implementation
        if carrier is None:
            return gather(value, destinations, axis, options)
        local = [tf.cast(v, carrier) for v in local]
        gathered = gather(keras_seams.regroup(local), destinations, axis, options)
        return tf.nest.map_structure(lambda v: tf.cast(v, dtype), gathered)


def own_tensors(value: Any) -> Any:
    """Returns a replica's value in tensors that no other replica has.

    Where replicas hand one and the same tensor to `merge_call`, TensorFlow takes it for a single value: a sum over
    the replicas would count it once.
    """
    return tf.nest.map_structure(lambda v: tf.identity(v) if tf.is_tensor(v) else v, value, expand_composites=True)


class KerasStrategyMixin:
    """Goes in front of one of TensorFlow's `Strategy` classes: what Keras 3 asks of a strategy."""

    # How the seams know a strategy of ours.
    is_tfdistkit_strategy = True

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
        if self.num_replicas_in_sync == 1 and isinstance(dataset, tf.data.Dataset):
            # Nothing to split: TensorFlow's distributed iterator would only cost time (1 ms a step).
            return dataset
        if isinstance(dataset, tf.data.Dataset) and keras_seams.batch_size_of(dataset) is None:
            # What tf.data batched lies in memory of its own already, and only there it knows the batch size,
            # by which it cuts a worker's own part.
            dataset = batch_parts.keep_arrays_safe(dataset)
        steps = self._steps_of_own_data(dataset)
        if steps is None and isinstance(dataset, tf.data.Dataset):
            Split(dataset.element_spec, marks_of(dataset))  # raises what cannot be cut
        if steps is None:
            distributed = super().experimental_distribute_dataset(_split_every_batch(dataset), options)
        else:
            distributed = super().distribute_datasets_from_function(lambda _: steps, options)
        if isinstance(dataset, tf.data.Dataset):
            # What the hooks of `fit` have to know, and TensorFlow does not tell.
            distributed.tfdistkit_element_spec = dataset.element_spec
            distributed.tfdistkit_is_own_part = self._is_own_part(dataset)
        return distributed

    def sum_gradients(self, gradients: list[Any]) -> list[Any]:
        """Sums the gradients of the replicas; called in each of them, before the optimizer looks at them.

        Args:
            gradients: This replica's part of each gradient: tensors or IndexedSlices.

        Returns:
            The sums, the same on all replicas.
        """
        own, context = step.current(), tf.distribute.get_replica_context()
        with contextlib.nullcontext() if own is None else own.summing():
            return context.all_reduce(tf.distribute.ReduceOp.SUM, [_with_a_row(g) for g in gradients])

    def apply_summed(self, gradients: list[Any], apply: Callable[[list[Any]], None]) -> None:
        """Sums the gradients of the replicas and applies them; called in each replica.

        Args:
            gradients: This replica's part of each gradient; none where nothing has a gradient.
            apply: Updates the variables; called with the sums.
        """
        apply(self.sum_gradients(gradients) if gradients else [])

    def optimizer_variables(self) -> contextlib.AbstractContextManager[None]:
        """Within it, an optimizer creates variables of its own."""
        return contextlib.nullcontext()

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
        if self.num_replicas_in_sync > 1 and len(self.extended.worker_devices) == 1 and batch_parts.can_split(dataset):
            return batch_parts.split(dataset, self.num_replicas_in_sync, self._local_replica_ids())
        return self.experimental_distribute_dataset(dataset)

    def distribute_keras_batches(self, dataset: Any, sample: Callable[[Any, tf.Tensor], Any] | None = None) -> Any:
        """As `distribute_batches`, for the steps of Keras: in them a replica without rows has a row that stands in.

        Args:
            dataset: What `fit`, `evaluate` or `predict` reads: global batches, the same on all workers.
            sample: Called with each global batch and its number; what it returns travels with the elements.
        """
        dataset = without_idle_tuning(dataset)
        if self.num_replicas_in_sync == 1 or not batch_parts.can_split(dataset):
            return self.experimental_distribute_dataset(dataset)
        own = self._local_replica_ids()
        parts = batch_parts.split(dataset, self.num_replicas_in_sync, own, batch_parts.KerasPart, sample)
        if len(own) == 1:
            return parts
        distributed = super().distribute_datasets_from_function(lambda _: parts)
        distributed.tfdistkit_element_spec = dataset.element_spec
        return distributed

    def _local_replica_ids(self) -> range:
        first = keras_seams.first_replica_id(self)
        return range(first, first + len(self.extended.worker_devices))

    def _steps_of_own_data(self, dataset: Any) -> tf.data.Dataset | None:
        """What a worker's own dataset gives its replicas, where `tfdistkit.data` knows better than TensorFlow."""
        replicas, devices = self.num_replicas_in_sync, len(self.extended.worker_devices)
        if not isinstance(dataset, tf.data.Dataset) or not self._is_own_part(dataset):
            return None
        batch_size = keras_seams.batch_size_of(dataset)
        return steps_of_own_data(dataset, batch_size, replicas, keras_seams.first_replica_id(self), devices)

    def _is_own_part(self, dataset: tf.data.Dataset) -> bool:
        """Whether each of several workers brings a dataset of its own, which must not be split (`OFF`)."""
        policy = dataset.options().experimental_distribute.auto_shard_policy
        several = self.num_replicas_in_sync > len(self.extended.worker_devices)
        return several and policy == tf.data.experimental.AutoShardPolicy.OFF

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        # Keras reduces scalars, which have no axis 0, along axis 0 (tensorflow#72388).
        if axis == 0 and getattr(value, "shape", None) is not None and tf.TensorShape(value.shape).rank == 0:
            axis = None
        return super().reduce(reduce_op, value, axis)


def _with_a_row(value: Any) -> Any:
    """Gives IndexedSlices without rows one of zeros: TensorFlow crashes when all replicas gather nothing.

    That happens to a table, or a part of one, in which nobody looked anything up in a batch.
    """
    if not isinstance(value, tf.IndexedSlices):
        return value
    missing = tf.cast(tf.equal(tf.size(value.indices), 0), tf.int32)
    amounts = [[0, missing], *[[0, 0]] * (value.values.shape.rank - 1)]
    return tf.IndexedSlices(tf.pad(value.values, amounts), tf.pad(value.indices, amounts[:1]), value.dense_shape)


def _split_every_batch(dataset: Any) -> Any:
    """Turns auto-sharding from AUTO to DATA, so that the replicas share every global batch of one process.

    AUTO shards by file where it can: each worker then makes its batches from other files, and a step no
    longer sees the rows that one process would see. A policy that the user chose stays.
    """
    policy = tf.data.experimental.AutoShardPolicy
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    if dataset.options().experimental_distribute.auto_shard_policy != policy.AUTO:
        return dataset
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy.DATA
    return dataset.with_options(options)


def require_single_process(name: str, cluster: ClusterSpec) -> None:
    """Raises:
    UnsupportedError: if this process is one of several workers, which would each train a model of their own.
    """
    if cluster.is_training and cluster.world_size > 1:
        raise UnsupportedError(
            explain(
                f"The strategy {name!r} trains in one process, but this is one of several: each would train alone.",
                received=f"worker {cluster.rank} of {cluster.world_size} in {cluster.source}",
                expected='the strategy "multiworker", or one process',
                do='Ask for tfdistkit.strategy("multiworker"), or start one process; where several shall train alone, '
                f"set {env.CLUSTER}=single.",
            )
        )
