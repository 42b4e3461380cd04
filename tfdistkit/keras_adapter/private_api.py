"""The code that touches private names of Keras and TensorFlow, which `private_names` lists with their reasons.

Everything else calls these functions, so that no other file has to know where Keras and TensorFlow keep things.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.trainers.compile_utils import CompileMetrics, MetricsList
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.utils import PyDataset
from tensorflow.python.autograph.core import ag_ctx as autograph_status
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute import values as tf_values
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
    coordination_config_pb2,
)
from tensorflow.python.distribute.coordinator import values as coordinator_values
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute.parameter_server_strategy_v2 import ParameterServerStrategyV2Extended
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable
from tensorflow.python.eager import context as tf_context
from tensorflow.python.eager import executor as tf_executor
from tensorflow.python.ops import control_flow_v2_func_graphs as control_flow_graphs
from tensorflow.python.trackable import base as trackable_base

from tfdistkit.keras_adapter import private_lookup

__all__ = [
    "CollectiveAllReduceExtended",
    "DataAdapter",
    "MirroredExtended",
    "MirroredVariable",
    "ParameterServerStrategyV2Extended",
    "PyDataset",
    "SyncOnReadVariable",
]

_REDUCED = (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)

# --------------------------------------------------------------------- Keras


def is_ours(strategy: Any) -> bool:
    """Whether a strategy is one of tfdistkit's."""
    return getattr(strategy, "is_tfdistkit_strategy", False)


def is_of_keras(thing: Any) -> bool:
    """Whether Keras defines a class, a function or a method; for another object, whether it defines its class."""
    return str(getattr(thing, "__module__", None) or type(thing).__module__).partition(".")[0] == "keras"


def strategy_of(model: Any) -> Any:
    """Returns the strategy in whose scope a model was made; None when it was made in none."""
    return model._distribute_strategy


def dataset_of(epoch_iterator: Any) -> Any:
    """Returns what an epoch iterator of `fit` iterates over."""
    return epoch_iterator._distributed_dataset


def given_dataset_of(epoch_iterator: Any) -> Any:
    """Returns the dataset that an epoch iterator was made of."""
    return getattr(epoch_iterator.data_adapter, "_dataset", None)


def let_data_end_epoch(epoch_iterator: Any, dataset: Any) -> None:
    """Puts a dataset in whose number of steps is unknown, so that an epoch ends when it has no more data."""
    # Where Keras knows the number of batches, as it does in one process, it makes an iterator at the end of an epoch
    # that is not used. A shuffled dataset counts it: the next epoch has the order after the next.
    makes_another = epoch_iterator._num_batches is not None
    epoch_iterator._distributed_dataset = dataset
    epoch_iterator._num_batches = None
    if epoch_iterator.steps_per_epoch is None:
        _expect_end(epoch_iterator, (lambda: iter(epoch_iterator._get_iterator())) if makes_another else lambda: None)


def _expect_end(epoch_iterator: Any, end: Callable[[], Any]) -> None:
    """Calls a function where an epoch has no more data, in place of Keras's warning: so such an epoch ends."""
    original = epoch_iterator.catch_stop_iteration

    @contextlib.contextmanager
    def catch_stop_iteration() -> Iterator[None]:
        with original():
            try:
                yield
                epoch_iterator.tf_sync()
            except (StopIteration, tf.errors.OutOfRangeError):
                end()
                raise

    epoch_iterator.catch_stop_iteration = catch_stop_iteration
    epoch_iterator._interrupted_warning = lambda: None


def raw_variable(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable; None before it has one. One of TensorFlow's is its own."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def is_of(strategy: Any, variable: Any) -> bool:
    """Whether a TensorFlow variable was created in the scope of a strategy."""
    return getattr(variable, "_distribute_strategy", strategy) is strategy


def owner_of(variable: Any) -> Any:
    """Returns the strategy in whose scope a variable of TensorFlow or Keras was created; None for none."""
    own = raw_variable(variable) if isinstance(variable, keras.Variable) else variable
    return getattr(own, "_distribute_strategy", None)


def autocast(variable: Any, value: Any) -> Any:
    """Returns a value of a Keras variable in the dtype that a mixed-precision layer computes in."""
    return variable._maybe_autocast(value)


def strategy_of_iterator(epoch_iterator: Any) -> Any:
    """Returns the strategy that an epoch iterator was made with."""
    return epoch_iterator._distribute_strategy


def let_data_end_every_epoch(epoch_iterator: Any) -> None:
    """Lets each epoch last as long as its data: Keras takes the number of steps of the first for that of all."""
    own = type(epoch_iterator)
    uncounted = property(lambda _: None, lambda _, __: None)
    epoch_iterator.__class__ = type(f"Uncounted{own.__name__}", (own,), {"_num_batches": uncounted})
    if epoch_iterator.steps_per_epoch is None:
        _expect_end(epoch_iterator, lambda: None)


def num_batches_of(epoch_iterator: Any) -> int | None:
    """Returns how many batches an epoch has; None while that is unknown."""
    return epoch_iterator._num_batches


def set_num_batches(epoch_iterator: Any, num_batches: int) -> None:
    """Tells how many batches an epoch has, where its data cannot."""
    epoch_iterator._num_batches = num_batches


def has_iterator(epoch_iterator: Any) -> bool:
    """Whether there is an iterator that the next epoch can go on with."""
    return epoch_iterator._current_iterator is not None


def go_on_with(epoch_iterator: Any, iterator: Any, steps_seen: int) -> None:
    """Lets the next epoch go on with an iterator over the data, of which so many batches were seen."""
    epoch_iterator._current_iterator = iterator
    epoch_iterator._steps_seen = steps_seen


def replace_data(epoch_iterator: Any, dataset: Any, iterator: Any) -> None:
    """Lets an epoch iterator read another dataset, and go on with an iterator over it where it has one."""
    epoch_iterator._distributed_dataset = dataset
    if epoch_iterator._current_iterator is not None:
        epoch_iterator._current_iterator = iterator


def shuffles_arrays(epoch_iterator: Any) -> bool:
    """Whether an epoch iterator reads arrays in an order of its own."""
    return bool(isinstance(epoch_iterator.data_adapter, ArrayDataAdapter) and epoch_iterator.data_adapter._shuffle)


def skip_epochs(epoch_iterator: Any, epochs: int) -> None:
    """Counts epochs as seen: from Keras 3.16 on, the order of arrays and of a PyDataset depends on their number."""
    if hasattr(epoch_iterator.data_adapter, "_epoch"):
        epoch_iterator.data_adapter._epoch += epochs


def make_data_again(epoch_iterator: Any) -> None:
    """Makes the dataset of an epoch iterator once more, by the seeds of this moment."""
    dataset = epoch_iterator.data_adapter.get_tf_dataset()
    strategy = epoch_iterator._distribute_strategy
    epoch_iterator._distributed_dataset = strategy.experimental_distribute_dataset(dataset)


def layers_of(model: Any) -> list[Any]:
    """Returns a model and all layers in it, those inside of others included."""
    return list(model._flatten_layers())


def calls_of(operation: Any) -> list[Any]:
    """Returns the calls of a layer or an operation in functional models: Keras's nodes."""
    return list(operation._inbound_nodes)


def compile_arguments(model: Any) -> dict[str, Any]:
    """Returns what `compile` was given for losses and metrics."""
    given = getattr(getattr(model, "_compile_config", None), "config", {})
    return {key: given[key] for key in ("loss", "loss_weights", "metrics", "weighted_metrics") if key in given}


def build_model(model: Any, batch: Any) -> None:
    """Builds a model from something with the shapes and dtypes of a batch."""
    model._symbolic_build(data_batch=batch)


def readable_by_rows(variable: Any) -> Any:
    """Returns the TensorFlow variable whose rows a Keras variable has here, on this replica.

    Args:
        variable: A Keras variable.

    Returns:
        A variable with `sparse_read`; None where the Keras variable stands for something else.
    """
    scope = get_stateless_scope()
    if scope is not None and scope.get_current_value(variable) is not None:
        return None
    own = variable._value
    if isinstance(own, tf_values.MirroredVariable):
        own = own._get_on_device_or_primary()  # TensorFlow's mirrored variables read no rows.
    readable = isinstance(own, tf.Variable) and not isinstance(own, tf_values.DistributedVariable)
    return own if readable and own.dtype.is_floating else None


def function_of(metric: Any) -> Any:
    """Returns the function that a metric applies to rows; None where it has none."""
    return metric._fn if isinstance(metric, keras.metrics.MeanMetricWrapper) else None


def axes_of(wrapper: Any) -> Any:
    """Returns the axis that a loss or metric applies its function along; -1, Keras's default, where it has none."""
    return (getattr(wrapper, "_fn_kwargs", None) or {}).get("axis", -1)


def is_container_of_metrics(metric: Any) -> bool:
    """Whether a metric is what `compile` makes to hold others."""
    return isinstance(metric, (CompileMetrics, MetricsList))


def loss_trackers(model: Any) -> list[Any]:
    """Returns the metrics that hold the loss of each output of a model; none if it has one output."""
    return list(getattr(getattr(model, "_compile_loss", None), "metrics", []))


def is_stateless() -> bool:
    """Whether variables are read and written in a `StatelessScope`."""
    return get_stateless_scope() is not None


def thread_state() -> dict[str, Any]:
    """Returns a copy of what Keras keeps for each thread: the dtype policy, names that are taken, seeds, scopes."""
    return {name: list(value) if isinstance(value, list) else value for name, value in _of_this_thread().items()}


def set_thread_state(state: dict[str, Any]) -> None:
    """Lets this thread go on with the state of another one (`thread_state`)."""
    _of_this_thread().update({name: list(v) if isinstance(v, list) else v for name, v in state.items()})


def add_to_thread_state(state: dict[str, Any]) -> None:
    """Takes over what another thread made once for the process: the seed generator, and the names that are taken."""
    own = _of_this_thread()
    for name in ("global_seed_generator", "object_name_uids"):
        if own.get(name) is None and state.get(name) is not None:
            own[name] = state[name]


def _of_this_thread() -> dict[str, Any]:
    return vars(global_state.GLOBAL_STATE_TRACKER)  # `keras.utils.clear_session` replaces it.


def as_dense_tensor(value: Any) -> Any:
    """Returns a tensor for a variable or a sparse tensor; other values as they are."""
    if isinstance(value, (keras.Variable, tf.Variable)):
        return tf.convert_to_tensor(value)
    return tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value


def mask_of(tensor: Any) -> Any:
    """Returns Keras's mask of a tensor; None if it has none."""
    return get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches Keras's mask to a tensor."""
    set_keras_mask(tensor, mask)


def apply_if_finite(optimizer: Any, grads: list[Any], trainable_variables: list[Any] | None) -> None:
    """What `LossScaleOptimizer.apply` does where there are no peers to agree with."""
    optimizer._common_apply(grads, trainable_variables)


def variables_of(optimizer: Any) -> list[Any]:
    """Returns the variables that a built optimizer updates."""
    return list(optimizer._trainable_variables)


def loss_scale_of(optimizer: Any) -> tf.Tensor | None:
    """Returns what an optimizer multiplies the loss by; None for nothing."""
    scale = optimizer.dynamic_scale if may_skip_steps(optimizer) else getattr(optimizer, "loss_scale_factor", None)
    return None if scale is None else tf.convert_to_tensor(scale, tf.float32)


def may_skip_steps(optimizer: Any) -> bool:
    """Returns whether it is a `LossScaleOptimizer`, which skips steps whose gradients are not finite."""
    return getattr(optimizer, "dynamic_scale", None) is not None


def adagrad_accumulator(optimizer: Any, variable: Any) -> Any:
    """Returns the Keras variable that an Adagrad keeps for a TensorFlow variable."""
    return optimizer._accumulators[optimizer._get_variable_index(variable)]


# ---------------------------------------------------------------- TensorFlow


def is_tf_function(fn: Any) -> bool:
    """Whether `fn` is a tf.function and not a Python function."""
    return isinstance(fn, tf.types.experimental.PolymorphicFunction)


def converted_python_function(fn: Any) -> Any:
    """Returns the Python function of a tf.function, converted by AutoGraph as tracing the tf.function would.

    AutoGraph keeps it where the tf.function finds it ever after: not what a caller of ours, left alone, would get.
    """
    if not fn._autograph:
        return fn.python_function
    enabled = autograph_status.ControlStatusCtx(autograph_status.Status.ENABLED)
    return in_autograph(tf.__internal__.autograph.tf_convert(fn.python_function, enabled, user_requested=True))


def in_autograph(fn: Any) -> Any:
    """Returns a function so that AutoGraph, if it has converted it, converts what it calls, too, though we call it."""

    def call_converted(*args: Any, **kwargs: Any) -> Any:
        with autograph_status.ControlStatusCtx(autograph_status.Status.ENABLED):
            return fn(*args, **kwargs)

    return call_converted if hasattr(fn, "autograph_info__") else fn


def is_compiled(fn: Any) -> bool:
    """Whether a tf.function is compiled by XLA (`jit_compile=True`)."""
    return bool(fn._jit_compile)


def is_in_loop(graph: tf.Graph) -> bool:
    """Whether what is traced now stands in a loop inside of `graph`."""
    return _is_in(control_flow_graphs.WhileBodyFuncGraph, graph)


def is_branch_or_loop(graph: tf.Graph) -> bool:
    """Whether a graph is that of a branch or a loop, which can use the tensors of the graph around it."""
    return isinstance(graph, control_flow_graphs.ControlFlowFuncGraph)


def is_in_branch(graph: tf.Graph) -> bool:
    """Whether what is traced now stands in a branch inside of `graph`."""
    return _is_in(control_flow_graphs.CondBranchFuncGraph, graph)


def _is_in(kind: type, graph: tf.Graph) -> bool:
    inner: Any = tf.compat.v1.get_default_graph()
    while inner is not None and inner is not graph:
        if isinstance(inner, kind):
            return True
        inner = inner.outer_graph
    return False


def clone_tf_function(fn: Any, python_function: Any) -> Any:
    """Returns a tf.function like `fn`, with its signature and options, that runs another Python function."""
    return fn._clone(python_function=python_function)


def type_specs(structured: Any) -> Any:
    """Returns what a tf.function is traced for: a type spec for each tensor of a structure."""
    return tf.nest.map_structure(lambda v: v if isinstance(v, tf.TypeSpec) else tf.type_spec_from_value(v), structured)


def select_replica(index: int, structured: Any) -> Any:
    """Returns the values of one local replica from a structure of per-replica values."""
    return distribute_utils.select_replica(index, structured)


def local_spec(element_spec: Any) -> Any:
    """Returns what the values of one local replica are like, of a structure of specs of per-replica values."""

    def of_first(spec: Any) -> Any:
        return spec._value_specs[0] if isinstance(spec, tf_values.PerReplicaSpec) else spec

    return tf.nest.map_structure(of_first, element_spec)


def regroup(values: list[Any]) -> Any:
    """Makes one per-replica value of one value a replica; a single value stays as it is."""
    return values[0] if len(values) == 1 else distribute_utils.regroup(tuple(values))


def is_summed(variable: Any) -> bool:
    """Whether a Keras variable is state of a metric that each replica keeps for itself."""
    own = variable._value
    return isinstance(own, tf_values.SyncOnReadVariable) and own.aggregation in _REDUCED


def assign_without_reading(variable: Any, new: Any) -> None:
    """Gives the state of a metric a value on all replicas; TensorFlow would also sum it over them, unused."""
    variable._value.assign(tf.cast(new, variable._value.dtype), read_value=False)


def local_part(variable: Any, replicas: int) -> tf.Tensor:
    """Returns what a replica adds to the state of a metric that is kept by replicas."""
    local, is_mean = tf.convert_to_tensor(variable._value), variable._value.aggregation == tf.VariableAggregation.MEAN
    return local / replicas if is_mean else local


def replicate(metric: Any) -> None:
    """Lets the state of a metric be what it is on this replica, because it is the same on all."""
    for variable in metric.variables:
        replicate_variable(variable)


def replicate_variable(variable: Any) -> None:
    """As `replicate`, for one variable."""
    if isinstance(variable._value, tf_values.SyncOnReadVariable):
        variable._value._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def is_replicated(metric: Any) -> bool:
    """Whether the state of a metric is the same on all replicas."""
    return any(
        isinstance(v._value, tf_values.SyncOnReadVariable) and v._value.aggregation not in _REDUCED
        for v in metric.variables
    )


def is_mirrored(value: Any) -> bool:
    """Whether a value is the same on all replicas by its kind."""
    return bool(distribute_utils.is_mirrored(value))


def initial_value(given: Any) -> Any:
    """Returns what a variable is to start with: a value, or what a function or a checkpoint gives."""
    value = given() if callable(given) else given
    return value.wrapped_value if isinstance(value, trackable_base.CheckpointInitialValue) else value


def replica_id(context: Any) -> int:
    """Returns a replica's number as a Python number (the public property makes a tensor)."""
    return int(context._replica_id_in_sync_group)


def first_replica_id(strategy: Any) -> int:
    """Returns the number of this process's first replica among all."""
    return int(strategy.extended._get_replica_id_in_sync_group(0))


def number_of_servers(strategy: Any) -> int:
    """Returns how many parameter servers a strategy has (the public `cluster_resolver` of such a strategy is None)."""
    return int(getattr(strategy.extended, "_num_ps", 0))


def tensorflow_has_started() -> bool:
    """Whether TensorFlow has taken its devices, after which neither they nor collectives can be set up."""
    return tf_context.context()._context_handle is not None


def configure_coordination(cluster: tf.train.ClusterSpec, timeout_s: float) -> None:
    """Gives the start of a job a deadline: TensorFlow waits an hour for workers that never come.

    TensorFlow leaves what is configured already as it is.
    """
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=job, num_tasks=cluster.num_tasks(job))
        for job in ("chief", "worker")
        if job in cluster.jobs
    ]
    leader = "chief" if "chief" in cluster.jobs else "worker"
    tf_context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        cluster_register_timeout_in_ms=int(timeout_s * 1000),
        coordinated_jobs=jobs,
    )


_executors = threading.local()


def wait_for_own_operations_only() -> None:
    """Gives this thread an executor of its own, so that it never waits for what other threads do.

    Where a thread has none, each element of a dataset first waits for the operations of the executor that all such
    threads share. On it TensorFlow frees the tensors on a worker; one that is cut off never answers.
    """
    if getattr(_executors, "own", None) is None:
        context = tf_context.context()
        context.ensure_initialized()
        _executors.own = tf_executor.new_executor(enable_async=False)
        context.executor = _executors.own


def use_extended(strategy: Any, extended: type) -> None:
    """Gives a strategy, which makes its extended part by itself, a subclass of that part."""
    strategy.extended.__class__ = extended


def has_ended(value: Any) -> bool:
    """Whether a step has ended, well or not, and what it returned is in this process.

    TensorFlow calls it ready before; to ask for it then would wait, without end, for a worker that is stopped.
    """
    return bool(value._status_available_event.is_set() and (value._has_fetched_to_local or value._error is not None))


def value_per_worker(strategy: Any, functions: list[Callable[[], Any]]) -> Any:
    """Returns what each worker makes by its function, and makes again after it was restarted."""
    return coordinator_values.PerWorkerValues(tuple(_remote_values(strategy, functions)))


def iterator_per_worker(strategy: Any, functions: list[Callable[[], Any]]) -> Any:
    """Returns the iterators that each worker makes by its function, and makes again after it was restarted."""
    return coordinator_values.PerWorkerDistributedIterator(tuple(_remote_values(strategy, functions)))


def _remote_values(strategy: Any, functions: list[Callable[[], Any]]) -> list[Any]:
    values = []
    for worker, function in zip(strategy.coordinator._cluster.workers, functions):
        made = tf.function(function, autograph=False).get_concrete_function()
        value = worker.create_resource(made)
        outputs = made.structured_outputs
        value._type_spec = getattr(outputs, "_type_spec", None) or tf.TensorSpec(outputs.shape, outputs.dtype)
        values.append(value)
    return values


def leave_functions() -> None:
    """Lets this process end without removing its functions from every worker, which are gone or end with it.

    TensorFlow does as much when Python has unloaded its modules; before that, it reports each that it cannot reach.
    """
    owner, name, _ = private_lookup.resolve("function_counts")
    setattr(owner, name, None)


def global_seed() -> int | None:
    """Returns what `tf.random.set_seed` set in this process."""
    return tf_context.global_seed()
