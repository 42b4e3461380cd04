"""Runs the replicas of all our strategies, over TensorFlow's transport.

TensorFlow runs each replica in a thread and synchronizes them in `merge_call`, which is impossible inside a branch or
a loop: gradient accumulation, EMA overwriting and loss scaling fail (keras#20582). Here every replica stays in replica
context and uses collectives, which work anywhere in a graph. A process with one device needs no thread: its replica
runs inline.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.collectives import string_bytes
from tfdistkit.collectives.carriers import CARRIERS
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import batch_sharding, layer_losses, placeholder_rows, row_counts, step
from tfdistkit.strategies.sync.aggregates import global_conditions, predicted_rows
from tfdistkit.strategies.sync.replica_deadlocks import SumsOfReplicas, ordered_by_replica, sum_without_deadlock
from tfdistkit.strategies.variables import as_own_variable, own_arguments


class ReplicaMixin:
    """A mixin before one of TensorFlow's `StrategyExtended` classes."""

    def _use_merge_call(self) -> bool:
        # Eager replicas run one after the other, so a collective of the first would deadlock: there, and only with
        # several devices, they use merge_call.
        return len(self.worker_devices) > 1 and tf.executing_eagerly()

    @tf.autograph.experimental.do_not_convert
    def _call_for_each_replica(self, fn: Any, args: tuple, kwargs: dict | None) -> Any:
        kwargs = kwargs or {}
        if private_api.is_tf_function(fn):
            return self._lifted(fn)(*args, **kwargs)
        if len(self.worker_devices) == 1:
            return self._run_inline(fn, args, kwargs)
        state = private_api.thread_state()
        made: dict[str, Any] = {}
        sums = SumsOfReplicas()
        outputs = super()._call_for_each_replica(self._in_step(fn, args, kwargs, state, made, sums), args, kwargs)
        sums.require_equal()
        private_api.add_to_thread_state(made)
        return outputs

    def _lifted(self, fn: Any) -> Any:
        """Returns a tf.function that runs the replicas inside, for a tf.function given to `strategy.run`.

        So the rows of each replica are counted inside the graph that uses them.
        """
        cache = self.__dict__.setdefault("_lifted_functions", weakref.WeakKeyDictionary())
        if fn not in cache:
            inner = private_api.converted_python_function(fn)

            @tf.autograph.experimental.do_not_convert
            def lifted(*args: Any, **kwargs: Any) -> Any:
                return self._call_for_each_replica(inner, args, kwargs)

            cache[fn] = private_api.clone_tf_function(fn, lifted)
        return cache[fn]

    def _run_inline(self, fn: Any, args: tuple, kwargs: dict) -> Any:
        args, kwargs = private_api.select_replica(0, (args, kwargs))
        with (
            tf.device(self.worker_devices[0]),
            tf.distribute.ReplicaContext(
                self._container_strategy(), replica_id_in_sync_group=self._get_replica_id_in_sync_group(0)
            ),
        ):
            return self._run_step(fn, args, kwargs, step.predicting_model())

    def _in_step(self, fn: Any, args: tuple, kwargs: dict, state: dict, made: dict, sums: SumsOfReplicas) -> Any:
        """Wraps the function of a replica thread so that it runs with a `ReplicaStep`.

        Keras keeps the dtype policy, seeds, scopes and names for each thread, and TensorFlow starts new threads for
        every step: they go on with the `state` of the thread that called, and leave what they had in the end in `made`.
        """
        total = self._sum_of_local_rows(args, kwargs)
        is_of_batch = [isinstance(value, tf.distribute.DistributedValues) for value in tf.nest.flatten((args, kwargs))]
        predicting = step.predicting_model()

        @tf.autograph.experimental.do_not_convert
        def in_step(*args: Any, **kwargs: Any) -> Any:
            private_api.set_thread_state(state)
            private_api.add_to_thread_state(made)
            layer_losses.keep_attributes(tf.distribute.get_replica_context())
            with ordered_by_replica(), sums.tracing_replica():
                outputs = self._run_step(fn, args, kwargs, predicting, total, is_of_batch)
            made.update(private_api.thread_state())
            return outputs

        return in_step

    def _run_step(
        self,
        fn: Any,
        args: tuple,
        kwargs: dict,
        predicting: Any,
        total: tf.Tensor | None = None,
        is_of_batch: list[bool] | None = None,
    ) -> Any:
        """Runs the user's function of `strategy.run` on one replica."""
        fn = private_api.in_autograph(fn)
        args, part = batch_sharding.unwrap(args)
        own = self._make_step(args, kwargs, part, total, is_of_batch)
        is_empty = tf.equal(own.rows, 0) if predicting is not None and own is not None and own.may_be_empty else None
        if is_empty is not None and part is None:
            args = placeholder_rows.with_placeholder(args, is_empty)
        if part is None and is_empty is None:
            placeholder_rows.warn_without_rows(own)
        with step.running(own), placeholder_rows.explaining_errors(own):
            rows = 0 if own is None or part is None else self._hidden_rows(own, part)
            outputs = fn(*placeholder_rows.hide_rows(args, rows), **placeholder_rows.hide_rows(kwargs, rows))
            if predicting is not None and own is not None:
                outputs = predicted_rows.once(own, outputs, predicting)
        return outputs if is_empty is None else placeholder_rows.without_placeholder(outputs, is_empty)

    def _hidden_rows(self, own: step.ReplicaStep, part: batch_sharding.BatchPart) -> int:
        # Of a static number of rows, `x.shape[0]` would be that of this replica, a number as any other.
        is_of_keras = isinstance(part, batch_sharding.KerasPart)
        return own.hide_static_rows() if is_of_keras or part.has_unknown_total else 0

    def _sum_of_local_rows(self, args: tuple, kwargs: dict) -> tf.Tensor | None:
        """Returns the rows of all replicas if all are in this process, without communication; else None."""
        if self._num_replicas_in_sync != len(self.worker_devices):
            return None
        of_replicas = [private_api.select_replica(i, (args, kwargs)) for i in range(len(self.worker_devices))]
        part = batch_sharding.unwrap(of_replicas[0][0])[1]
        if part is not None:
            return part.total_rows
        is_of_batch = [isinstance(value, tf.distribute.DistributedValues) for value in tf.nest.flatten((args, kwargs))]
        rows = [row_counts.count_rows(values, is_of_batch)[0] for values in of_replicas]
        return None if any(r is None for r in rows) else tf.add_n(rows)

    def _make_step(
        self,
        args: tuple,
        kwargs: dict,
        part: batch_sharding.BatchPart | None,
        total: tf.Tensor | None,
        is_of_batch: list[bool] | None,
    ) -> step.ReplicaStep | None:
        replicas = self._num_replicas_in_sync
        if replicas == 1:
            return None
        rows, static_rows = row_counts.count_rows((args, kwargs), is_of_batch)
        if rows is not None and not tf.executing_eagerly():
            # A rank that is traced for no rows would fold its share, and prune sums that it multiplies by it: Horovod's
            # operations are pure functions for TensorFlow, and the other ranks wait for them.
            rows = tf.compat.v1.placeholder_with_default(rows, [])
        context = tf.distribute.get_replica_context()
        if part is not None:
            rows, total = part.rows, part.total_rows

        def sum_rows(own: step.ReplicaStep) -> tf.Tensor:
            return total if total is not None else context.all_reduce(tf.distribute.ReduceOp.SUM, own.rows)

        own = step.ReplicaStep(rows, sum_rows, replicas, private_api.replica_id(context), static_rows)
        own.has_placeholder = isinstance(part, batch_sharding.KerasPart)
        own.static_total = None if part is None else part.static_total
        if part is None:
            own.check_rows = lambda: row_counts.same_rows((args, kwargs), is_of_batch)
        return own

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if self._num_replicas_in_sync == 1:
            return value
        own = step.current()
        global_conditions.require_same_branch(own)
        if own is not None and own.traffic is not None:
            own.traffic.count_others(tf.nest.flatten(value))
        reduce = functools.partial(super()._replica_ctx_all_reduce, reduce_op, options=options)
        return reduce(value) if len(self.worker_devices) == 1 else sum_without_deadlock(reduce, value)

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return super()._reduce_to(reduce_op, self._per_replica(value), destinations, options)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        pairs = [(self._per_replica(value), destination) for value, destination in value_destination_pairs]
        return super()._batch_reduce_to(reduce_op, pairs, options)

    def _per_replica(self, value: Any) -> Any:
        """Returns one tensor for each replica where TensorFlow has merged the same object of all replicas.

        TensorFlow would count the merged value once, or refuse to sum it.
        """
        if len(self.worker_devices) == 1 or not isinstance(value, (tf.Tensor, tf.IndexedSlices)):
            return value
        copies = []
        for device in self.worker_devices:
            with tf.device(device):
                copies.append(tf.nest.map_structure(tf.identity, value, expand_composites=True))
        return private_api.regroup(copies)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        kwargs = own_arguments(kwargs)
        return as_own_variable(super()._create_variable(next_creator, **kwargs), kwargs)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        local = self._container_strategy().experimental_local_results(value)
        dtype = local[0].dtype
        if dtype == tf.string and self._num_replicas_in_sync > len(self.worker_devices):
            return self._gather_strings(local, destinations, axis, options)
        carrier = CARRIERS.get(dtype)
        gather = super()._gather_to_implementation
        if carrier is None:
            return gather(value, destinations, axis, options)
        local = [tf.cast(v, carrier) for v in local]
        gathered = gather(private_api.regroup(local), destinations, axis, options)
        return tf.nest.map_structure(lambda v: tf.cast(v, dtype), gathered)

    def _gather_strings(self, local: Any, destinations: Any, axis: int, options: Any) -> Any:
        def gather(values: list[Any]) -> Any:
            return self._gather_to_implementation(private_api.regroup(values), destinations, axis, options)

        lengths = gather([tf.strings.length(strings) for strings in local])
        longest = tf.reduce_max(self._container_strategy().experimental_local_results(lengths)[0])
        gathered = gather([string_bytes.to_bytes(strings, longest) for strings in local])
        return tf.nest.map_structure(string_bytes.from_bytes, gathered, lengths)


def own_tensors(value: Any) -> Any:
    """Returns a replica's value in tensors that it shares with no other replica.

    If replicas pass the same tensor to `merge_call`, TensorFlow merges it to a single value, and a sum over the
    replicas would count it once.
    """
    return tf.nest.map_structure(lambda v: tf.identity(v) if tf.is_tensor(v) else v, value, expand_composites=True)


def assign_moving_average(
    original: Any, variable: Any, value: Any, decay: Any, zero_debias: bool = True, name: Any = None
) -> Any:
    """Hook of TensorFlow's function, which takes the mean of the replicas for the value, of sums and uneven rows, too.

    In a Keras step it writes as in one process: the variable knows what to do with what each replica writes.
    """
    own = step.current()
    if own is None or not own.in_keras_step or zero_debias:
        return original(variable, value, decay, zero_debias, name)
    decay = tf.cast(tf.convert_to_tensor(1.0 - decay), variable.dtype)
    return variable.assign_sub((variable - tf.cast(value, variable.dtype)) * decay)


def add_weight(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of `Layer.add_weight`: creates non-trainable state so that the replicas agree on it (`LayerState`)."""
    strategy: Any = tf.distribute.get_strategy()
    if private_api.is_ours(strategy):
        given = inspect.signature(original).bind(layer, *args, **kwargs).arguments
        dtype = keras.backend.standardize_dtype(given.get("dtype") or layer.variable_dtype)
        if given.get("trainable") is False and given.get("aggregation", "none") == "none" and "float" in dtype:
            kwargs["aggregation"] = "mean"
    return original(layer, *args, **kwargs)


def next_seed(original: Any, generator: Any, ordered: bool = True) -> Any:
    """Gives every replica its own random numbers; those of replica 0 equal those of a single process."""
    seed = original(generator, ordered)
    own = step.current()
    if own is None or own.replica_id == 0:
        return seed
    # The golden ratio times 2**32 (Knuth, TAOCP 3, 6.4): far from the small seeds that people choose.
    offset = (own.replica_id * 0x9E3779B1) & 0xFFFFFFFF
    return tf.cast(tf.cast(seed, tf.uint32) + tf.constant([offset, 0], tf.uint32), seed.dtype)
