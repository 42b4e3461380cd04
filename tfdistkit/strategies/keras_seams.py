"""Everything that knows a private name of TensorFlow or Keras, each with its reason and upstream issue.

`SEAMS` lists the names; a test resolves each of them and names the one that a new version moved.
`install()` hooks Keras where a strategy of ours needs another behaviour. Every hook passes straight
through to Keras unless it runs under a strategy of ours, so models that use none see no change.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as keras_tf_optimizer
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_loss
from keras.src.trainers import compile_utils
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
    coordination_config_pb2,
)
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended
from tensorflow.python.distribute import values as tf_values
from tensorflow.python.eager import context as tf_context
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.strategies import lost_peer
from tfdistkit.strategies import step as steps


class Seam(NamedTuple):
    """A private name that we stand on: `module:attribute`, the parameters that we rely on, and why."""

    where: str
    parameters: tuple[str, ...]
    why: str


_TRAINER = "keras.src.backend.tensorflow.trainer"
_MWMS = "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended"
_MIRRORED = "tensorflow.python.distribute.mirrored_strategy:MirroredExtended"

SEAMS = (
    Seam(f"{_TRAINER}:TensorFlowTrainer._make_function", ("self", "step_function"), "one sum a step (keras#20585)"),
    Seam(f"{_TRAINER}:TensorFlowTrainer._maybe_symbolic_build", ("self", "iterator", "data_batch"), "keras#20585"),
    Seam(f"{_TRAINER}:TensorFlowTrainer._symbolic_build", ("self", "iterator", "data_batch"), "keras#21172"),
    Seam(f"{_TRAINER}:TensorFlowTrainer.predict_on_batch", ("self", "x"), "one prediction a row"),
    Seam(f"{_TRAINER}:TFEpochIterator.__init__", ("self", "distribute_strategy"), "one shuffling seed for all ranks"),
    Seam("keras.src.trainers.epoch_iterator:EpochIterator._interrupted_warning", ("self",), "datasets split by the user"),
    Seam("keras.callbacks:ProgbarLogger.set_params", ("self", "params"), "one progress bar for the job"),
    Seam(f"{_TRAINER}:reduce_per_replica", ("values", "strategy", "reduction"), "tensorflow#72388"),
    Seam("keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients", ("self", "grads_and_vars"),
         "gradients are summed before clipping, accumulation and loss scaling (keras#20582)"),
    Seam("keras.src.optimizers.base_optimizer:BaseOptimizer.apply", ("self", "grads", "trainable_variables"), "same"),
    Seam("keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
         ("self", "grads", "trainable_variables"), "same"),
    Seam("keras.src.losses.loss:reduce_values", ("values", "sample_weight", "reduction"), "weights by rows"),
    Seam("keras.src.losses.loss:apply_mask", ("sample_weight", "mask", "dtype", "reduction"), "weights by rows"),
    Seam("keras.src.losses.loss:scale_loss_for_distribution", ("value",), "weights by rows"),
    Seam("keras.src.losses.loss:unscale_loss_for_distribution", ("value",), "weights by rows"),
    Seam("keras.src.trainers.compile_utils:loss_module", (), "losses of several outputs, weights by rows"),
    Seam("keras.src.random.seed_generator:SeedGenerator.next", ("self", "ordered"), "keras#20611"),
    Seam("keras.src.layers.layer:Layer.add_weight", ("self", "trainable", "aggregation"), "BatchNormalization state"),
    Seam("keras.src.backend.common.variables:Variable.__float__", ("self",), "float(optimizer.iterations)"),
    Seam("keras.src.backend.common.variables:Variable.__int__", ("self",), "int(optimizer.iterations)"),
    Seam(f"{_MWMS}._initialize_multi_worker", ("self", "cluster_resolver"), "deadlines of the start (tensorflow#46931)"),
    Seam(f"{_MWMS}._initialize_local", ("self", "cluster_resolver", "devices"), "one worker"),
    Seam(f"{_MWMS}._use_merge_call", ("self",), "collectives inside branches (keras#20582)"),
    Seam(f"{_MWMS}._call_for_each_replica", ("self", "fn", "args", "kwargs"), "the inline replica"),
    Seam(f"{_MWMS}._gather_to_implementation", ("self", "value", "destinations", "axis", "options"), "bfloat16"),
    Seam(f"{_MWMS}._create_variable", ("self", "next_creator"), "BatchNormalization state"),
    Seam(f"{_MIRRORED}._use_merge_call", ("self",), "collectives inside branches (keras#20582)"),
    Seam(f"{_MIRRORED}._call_for_each_replica", ("self", "fn", "args", "kwargs"), "weights by rows"),
    Seam(f"{_MIRRORED}._replica_ctx_all_reduce", ("self", "reduce_op", "value", "options"), "sums without merge_call"),
    Seam("tensorflow.python.ops.control_flow_v2_func_graphs:ControlFlowFuncGraph.capture_call_time_value",
         ("self", "closure", "spec", "key", "default_value"), "collectives of a tf.function called in a branch"),
    Seam("tensorflow.python.distribute.distribute_utils:select_replica", ("replica_id", "structured"), "replica"),
    Seam("tensorflow.python.distribute.distribute_utils:regroup", ("values",), "replica"),
    Seam("tensorflow.python.distribute.values:MirroredVariable._update_replica", ("self", "update_fn", "value"), "state"),
    Seam("tensorflow.python.distribute.values:MirroredVariable._get_on_device_or_primary", ("self",), "layer state"),
    Seam("tensorflow.python.eager.context:Context.configure_coordination_service",
         ("self", "service_type", "service_leader", "cluster_register_timeout_in_ms", "coordinated_jobs"),
         "deadlines of the start (tensorflow#46931)"),
    Seam("tensorflow.python.eager.context:global_seed", (), "one shuffling seed for all ranks"),
)

# Numbers. A confusion matrix of a thousand classes in every step would cost more than exact batch logs are worth.
_MOST_METRIC_STATE = 2**16


def resolve(seam: Seam) -> Any:
    """Returns what a seam names.

    Raises:
        UnsupportedError: if it is not there, or no longer takes the parameters that we rely on.
    """
    module, _, path = seam.where.partition(":")
    try:
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        raise UnsupportedError(_moved(seam, "it is gone")) from None
    if seam.parameters:
        has = inspect.signature(found).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in has.values())
        missing = [p for p in seam.parameters if p not in has and not takes_any]
        if missing:
            raise UnsupportedError(_moved(seam, f"it no longer takes {', '.join(missing)}"))
    return found


def _moved(seam: Seam, how: str) -> str:
    return explain(
        f"TensorFlow {tf.__version__} with Keras {keras.__version__} moved `{seam.where}`: {how}. "
        f"tfdistkit stands on it for: {seam.why}.",
        do="Install versions that tfdistkit is tested with: see the README.",
    )


# ---------------------------------------------------------------- TensorFlow


def is_tf_function(fn: Any) -> bool:
    """Whether `fn` is a tf.function and not a Python function."""
    return isinstance(fn, tf.types.experimental.PolymorphicFunction)


def converted_python_function(fn: Any) -> Any:
    """Returns the Python function of a tf.function as AutoGraph would convert it."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(fn.python_function, autograph.control_status_ctx())


def clone_tf_function(fn: Any, python_function: Any) -> Any:
    """Returns a tf.function like `fn`, with its signature and options, that runs another Python function."""
    return fn._clone(python_function=python_function)


def select_replica(index: int, structured: Any) -> Any:
    """Returns the values of one local replica from a structure of per-replica values."""
    return distribute_utils.select_replica(index, structured)


def regroup(values: list[Any]) -> Any:
    """Makes one per-replica value of one value a replica; a single value stays as it is."""
    return values[0] if len(values) == 1 else distribute_utils.regroup(tuple(values))


def replica_id(context: Any) -> int:
    """Returns a replica's number as a Python number (the public property makes a tensor)."""
    return int(context._replica_id_in_sync_group)


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


def global_seed() -> int | None:
    """Returns what `tf.random.set_seed` set in this process."""
    return tf_context.global_seed()


def _capture_in_function(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets a branch or a loop pass a call-time value (a collective's key) on from the function around it.

    TensorFlow makes the placeholder inside the branch, where nothing ever feeds it: a tf.function with a
    collective in it fails when it is called in a branch, as Keras does with `steps_per_execution` > 1
    ("You must feed a value for placeholder tensor"). Outside of that case this is never called.
    """
    with graph.outer_graph.as_default():
        return graph.outer_graph.capture_call_time_value(*args, **kwargs)


class LayerState(tf_values.MirroredVariable):
    """Non-trainable state of a layer, such as the moving statistics of BatchNormalization.

    Keras creates it without aggregation, and each replica would go its own way. Inside a Keras step it is
    written locally and summed with everything else at the end of the step, in one collective; elsewhere
    at once. Replicas weigh by their rows.
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        step = steps.current()
        if step is not None and step.in_keras_step:
            if not any(state is self for state in step.layer_state):
                step.layer_state.append(self)
        elif step is not None:
            value = step.weighted_sum(tf.convert_to_tensor(value, self.dtype))
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)

    def write_local(self, value: tf.Tensor) -> None:
        """Writes this replica's copy."""
        self._get_on_device_or_primary().assign(value)


class StepCounter(tf_values.MirroredVariable):
    """`optimizer.iterations`: every replica adds the same 1, so none has to be told.

    TensorFlow sends the first replica's number to the others in `merge_call`, which cannot happen in the
    branch that a LossScaleOptimizer counts in (keras#20582).
    """

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        return update_fn(self._get_on_device_or_primary(), value, **kwargs)


def as_own_variable(variable: Any, created_with: dict[str, Any]) -> Any:
    """Makes a mirrored variable `LayerState` if it was created as such: not trainable, aggregated by MEAN.

    Or a `StepCounter`, by the name that Keras gives to `optimizer.iterations`.
    """
    if type(variable) is not tf_values.MirroredVariable:
        return variable
    if created_with.get("name") == "iteration" and variable.dtype.is_integer:
        variable.__class__ = StepCounter
    if (
        created_with.get("trainable") is False
        and variable.aggregation == tf.VariableAggregation.MEAN
        and variable.dtype.is_floating
    ):
        variable.__class__ = LayerState
    return variable


# --------------------------------------------------------------------- Keras


def is_ours(strategy: Any) -> bool:
    """Whether a strategy is one of tfdistkit's."""
    return getattr(strategy, "is_tfdistkit_strategy", False)


@functools.cache
def install() -> None:
    """Hooks Keras, once a process. Called when the first strategy of ours is made.

    Raises:
        UnsupportedError: if this TensorFlow or Keras moved a name that we stand on.
    """
    for seam in SEAMS:
        resolve(seam)
    ControlFlowFuncGraph.capture_call_time_value = _capture_in_function
    _wrap(keras_trainer.TensorFlowTrainer, "_make_function", _make_function)
    _wrap(keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build", _maybe_symbolic_build)
    _wrap(keras_trainer.TensorFlowTrainer, "predict_on_batch", _predict_on_batch)
    for method in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        _wrap(keras_trainer.TensorFlowTrainer, method, _name_lost_peer)
    _wrap(keras_trainer, "reduce_per_replica", _reduce_per_replica)
    _wrap(keras_trainer.TFEpochIterator, "__init__", _make_epoch_iterator)
    _wrap(keras.callbacks.ProgbarLogger, "set_params", _one_progress_bar)
    _wrap(keras_tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients", _all_reduce_sum_gradients)
    _wrap(importlib.import_module("keras.src.optimizers.base_optimizer").BaseOptimizer, "apply", _apply)
    _wrap(keras.optimizers.LossScaleOptimizer, "apply", _apply)
    _wrap(keras_loss, "reduce_values", _reduce_values)
    _wrap(keras_loss, "apply_mask", _apply_mask)
    _wrap(keras_loss, "scale_loss_for_distribution", _scale_loss)
    _wrap(keras_loss, "unscale_loss_for_distribution", _unscale_loss)
    compile_utils.loss_module = _LossModuleOfOutputs()
    _wrap(keras.random.SeedGenerator, "next", _next_seed)
    _wrap(keras.layers.Layer, "add_weight", _add_weight)
    variable = importlib.import_module("keras.src.backend.common.variables").Variable
    _wrap(variable, "__float__", functools.partial(_to_python, kind=float))
    _wrap(variable, "__int__", functools.partial(_to_python, kind=int))


def _wrap(owner: Any, name: str, hook: Any) -> None:
    """Replaces `owner.name` by `hook(original, *args, **kwargs)`."""
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)

    @functools.wraps(original)
    @tf.autograph.experimental.do_not_convert
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(owner, name, hooked)


def _make_function(original: Any, model: Any, step_function: Any) -> Any:
    """The replica's part of a train or test step: afterwards logs and layer state agree on all replicas."""
    strategy = model.distribute_strategy
    if not is_ours(strategy) or strategy.num_replicas_in_sync == 1:
        return original(model, step_function)
    if model.jit_compile is True and "CPU" in strategy.extended.worker_devices[0].upper():
        raise UnsupportedError(
            explain(
                "`jit_compile=True` cannot work with several replicas on CPUs: XLA has no collectives there.",
                received=f"{strategy.num_replicas_in_sync} replicas on {strategy.extended.worker_devices[0]}",
                expected="`jit_compile='auto'` or `jit_compile=False`",
                do="Remove `jit_compile=True` from `model.compile(...)`.",
            )
        )

    @functools.wraps(step_function)
    def keras_step(data: Any) -> Any:
        step = steps.current()
        if step is None:
            return step_function(data)
        step.in_keras_step = True
        return _agree(model, step, step_function(data))

    @functools.wraps(step_function)
    def step_with_data(data: Any) -> Any:
        with tf.control_dependencies([v for v in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(v)]):
            return keras_step(data)

    function, uncounted_function = original(model, keras_step), original(model, step_with_data)

    def on_parts(iterator: Any) -> Any:
        if getattr(iterator, "tfdistkit_uncounted", False):
            return uncounted_function(iterator)
        # train_on_batch and test_on_batch hand over the global batch, not an iterator over a replica's part.
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            iterator = (_split_batch(strategy, batch) for batch in iterator)
        return function(iterator)

    return on_parts


def _agree(model: Any, step: steps.ReplicaStep, logs: Any) -> Any:
    """Makes logs and layer state the same on all replicas, with one collective for each dtype.

    Logs that are the results of the model's metrics become those of the metrics of all replicas together,
    as one process would show them; other scalars become their mean.
    """
    states = step.layer_state
    local = [tf.convert_to_tensor(v) for v in states]
    parts = step.without_empty([v * tf.cast(step.share(), v.dtype) for v in local])
    variables = _metric_variables(model, logs)
    leaves = tf.nest.flatten(logs)
    scalars = [i for i, v in enumerate(leaves) if tf.is_tensor(v) and v.shape.rank == 0 and v.dtype.is_floating]
    parts += [tf.convert_to_tensor(v.value) for v in variables] or [leaves[i] / step.replicas for i in scalars]
    summed = _sum_packed(step, parts)
    for state, value in zip(states, summed):
        state.write_local(value)
    summed = summed[len(states) :]
    if variables:
        with keras.StatelessScope(state_mapping=list(zip(variables, summed))):
            return model.get_metrics_result()
    for i, value in zip(scalars, summed):
        leaves[i] = value
    return tf.nest.pack_sequence_as(logs, leaves)


def _metric_variables(model: Any, logs: Any) -> list[Any]:
    """Returns the state of the model's metrics if `logs` are their results, by the rule that `fit` has for it."""
    if not isinstance(logs, dict) or set(logs) != set(model.get_metrics_result()):
        return []
    variables = model.metrics_variables
    return variables if sum(v.shape.num_elements() for v in variables) <= _MOST_METRIC_STATE else []


def _sum_packed(step: steps.ReplicaStep, parts: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums tensors over the replicas, all of a dtype in one collective."""
    summed = list(parts)
    for dtype in {p.dtype for p in parts}:
        of_dtype = [i for i, p in enumerate(parts) if p.dtype == dtype]
        packed = step.sum(tf.concat([tf.reshape(parts[i], [-1]) for i in of_dtype], 0))
        for i, value in zip(of_dtype, tf.split(packed, [parts[i].shape.num_elements() for i in of_dtype])):
            summed[i] = tf.reshape(value, parts[i].shape)
    return summed


def _reduce_per_replica(original: Any, values: Any, strategy: Any, reduction: str) -> Any:
    """Takes the logs, which agree already (`_agree`), from the first replica."""
    if not is_ours(strategy) or reduction != "auto":
        return original(values, strategy, reduction)

    def reduce(value: Any) -> Any:
        local = strategy.experimental_local_results(value)[0]
        agreed = not tf.is_tensor(local) or (local.shape.rank == 0 and local.dtype.is_floating)
        return local if agreed else original(value, strategy, reduction)

    return keras.tree.map_structure(reduce, values)


def _make_epoch_iterator(
    original: Any, iterator: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Lets all ranks shuffle arrays and PyDatasets alike (`MultiWorkerStrategy.agreed_shuffling`)."""
    agreed: Any = contextlib.nullcontext()
    if kwargs.get("shuffle") and hasattr(distribute_strategy, "agreed_shuffling"):
        agreed = distribute_strategy.agreed_shuffling()
    with agreed:
        original(iterator, distribute_strategy, *args, **kwargs)
    if is_ours(distribute_strategy) and _is_split_by_user(iterator.data_adapter, distribute_strategy):
        iterator.data_adapter = _Uncounted(iterator.data_adapter)
        iterator._distributed_dataset = _Uncounted(iterator._distributed_dataset)
        iterator._num_batches = None
        if iterator.steps_per_epoch is None:
            iterator._interrupted_warning = lambda: None  # running out of data is how an uncounted epoch ends


def _is_split_by_user(adapter: Any, strategy: Any) -> bool:
    """Whether each of several workers has a dataset of its own that TensorFlow must not split (`OFF`)."""
    dataset = adapter.get_tf_dataset()
    if not isinstance(dataset, tf.data.Dataset) or strategy.num_replicas_in_sync == len(strategy.extended.worker_devices):
        return False
    return dataset.options().experimental_distribute.auto_shard_policy == tf.data.experimental.AutoShardPolicy.OFF


class _Uncounted:
    """A data adapter, and its distributed dataset, that do not say how many steps an epoch has.

    TensorFlow cuts each batch of a worker's own dataset into one step for each replica of the job, but Keras
    counts the batches: it would end an epoch of two workers after half of the data, and after a different
    number of steps on each worker if their parts differ, which hangs. Uncounted, the data itself ends it.

    There Keras runs a step without data, which fails, but not before it has counted `optimizer.iterations`
    up: nothing of that needs data. For the iterators made here, `_make_function` lets everything wait for it.
    """

    num_batches = None

    def __init__(self, counted: Any):
        self._counted = counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counted, name)

    def __iter__(self) -> Any:
        iterator = iter(self._counted)
        iterator.tfdistkit_uncounted = True
        return iterator


def _one_progress_bar(original: Any, bar: Any, params: Any) -> None:
    """Shows the progress bar of `fit`, `evaluate` and `predict` on the chief alone: all ranks' bars are equal."""
    original(bar, params)
    strategy = getattr(bar.model, "distribute_strategy", None)
    if is_ours(strategy) and not strategy.extended.should_checkpoint:
        bar.verbose = 0


def _maybe_symbolic_build(original: Any, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Builds a model from what a batch looks like; Keras takes a batch and averages it over all replicas.

    Averaging fails for every batch under MultiWorkerMirroredStrategy (keras#20585, keras#20329) and for
    strings and integers under MirroredStrategy (keras#21172), and a batch that was taken for it is lost
    to a generator.
    """
    strategy = model._distribute_strategy
    if not is_ours(strategy):
        return original(model, iterator=iterator, data_batch=data_batch)
    if iterator is not None:
        data_batch = _batch_like(strategy, iterator)
    if type(model).call is keras.Model.call:
        return None  # Only a train_step of its own knows how to call it (a GAN, say).
    with strategy.scope():
        model._symbolic_build(data_batch=data_batch)
    return None


def _batch_like(strategy: Any, iterator: Any) -> Any:
    """Returns something with the shapes and dtypes of one replica's batch, of the same structure."""
    dataset = iterator._distributed_dataset
    spec = getattr(dataset, "tfdistkit_element_spec", None)
    if isinstance(dataset, tf.data.Dataset):
        spec = dataset.element_spec
    if spec is not None:
        return tf.nest.map_structure(lambda s: s if hasattr(s, "shape") and hasattr(s, "dtype") else None, spec)
    for _, *_, it in iterator:  # A dataset that the user distributed: only a batch can tell.
        return keras.tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], next(it))
    return None


def _split_batch(strategy: Any, batch: Any) -> Any:
    """Splits a global batch, the same on all ranks, into one part for each replica."""

    def part(context: Any) -> Any:
        def rows(value: Any) -> Any:
            if value is None:
                return None
            value = tf.convert_to_tensor(value)
            total = value.shape[0]
            most = -(-total // context.num_replicas_in_sync)
            first = min(total, context.replica_id_in_sync_group * most)
            return value[first : first + most]

        return keras.tree.map_structure(rows, batch)

    return strategy.experimental_distribute_values_from_function(part)


def _predict_on_batch(original: Any, model: Any, x: Any) -> Any:
    """Each replica predicts its part of the batch; Keras lets each predict all of it, and returns all of them."""
    strategy = model.distribute_strategy
    if is_ours(strategy) and strategy.num_replicas_in_sync > 1:
        x = _split_batch(strategy, x)
    return original(model, x)


def _name_lost_peer(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Raises what TensorFlow raises when another worker is gone, in words that name it."""
    try:
        return original(model, *args, **kwargs)
    except tf.errors.OpError as error:
        clear = lost_peer.explained(error) if is_ours(model.distribute_strategy) else None
        if clear is None:
            raise
        raise clear from error


def _apply(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Sums gradients over the replicas before anything looks at them.

    Keras sums them last, so that clipping, accumulation and the test for finiteness see the gradients of
    one replica: results differ from one process, and a NaN on one rank alone hangs the job.
    """
    step = steps.current()
    if step is None or step.gradients_are_reduced:
        return original(optimizer, grads, trainable_variables)
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    present = [i for i, g in enumerate(grads) if g is not None]
    if present:
        summed = step.sum(step.without_empty([grads[i] for i in present]))
        for i, gradient in zip(present, summed):
            grads[i] = gradient
    with step.reduced_gradients():
        return original(optimizer, grads, trainable_variables)


def _all_reduce_sum_gradients(original: Any, optimizer: Any, grads_and_vars: Any) -> Any:
    step = steps.current()
    if step is not None and step.gradients_are_reduced:
        return list(grads_and_vars)
    return original(optimizer, grads_and_vars)


def _reduce_values(original: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
    """Divides by what the global batch holds, not by what this replica's part of it holds."""
    step = steps.current()
    if step is None or reduction in (None, "none"):
        return original(values, sample_weight, reduction)
    if values.shape.rank == 0:
        # A loss function that returns a scalar: Keras forgets to scale it. A mean is what it must be.
        return keras_loss.scale_loss_for_distribution(values)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = step.sum(tf.reduce_sum(tf.cast(sample_weight, values.dtype)))
        return _as_seen(step, tf.math.divide_no_nan(tf.reduce_sum(values), total) * step.replicas)
    if reduction == "sum":
        return _as_seen(step, tf.reduce_sum(values) * step.replicas)
    return original(values, sample_weight, reduction)


def _apply_mask(original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    """Divides by the valid entries of the global batch, as Keras does by those of its own batch."""
    step = steps.current()
    if step is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return original(sample_weight, mask, dtype, reduction)
    weight = original(sample_weight, mask, dtype, "sum")
    mask = tf.cast(mask, dtype)
    counts = step.sum(tf.stack([tf.cast(tf.size(mask), dtype), tf.reduce_sum(mask)]))
    return weight * tf.math.divide_no_nan(counts[0], counts[1])


def _scale_loss(original: Any, value: Any) -> Any:
    step = steps.current()
    if step is None:
        return original(value)
    return _as_seen(step, value * tf.cast(step.relative_share(), value.dtype))


def _as_seen(step: steps.ReplicaStep, value: Any) -> Any:
    """Returns a replica's loss such that the mean over the replicas is the loss of the global batch.

    In a Keras step user code sees that value, as in one process (Keras would show it divided by the
    replicas), and only its gradient is divided. In a loop of the user's own the value is divided too, for
    there the replicas' losses are summed: https://www.tensorflow.org/tutorials/distribute/custom_training
    """
    scale = 1.0 / step.replicas
    return _scale_gradient(value, scale) if step.in_keras_step else value * scale


def _scale_gradient(value: Any, scale: float) -> Any:
    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        return tf.identity(x), lambda upstream: upstream * scale

    return scaled(value)


def _unscale_loss(original: Any, value: Any) -> Any:
    """For the tracker of the total loss, which weighs what it gets by this replica's rows."""
    step = steps.current()
    if step is None:
        return original(value)
    if not step.in_keras_step:
        value = value * step.replicas
    return tf.math.divide_no_nan(value, tf.cast(step.relative_share(), value.dtype))


class _LossModuleOfOutputs:
    """`keras.src.losses.loss` as the losses of single outputs see it.

    Their trackers weigh a batch by its rows only where these are known while tracing; elsewhere every
    batch counts 1, and then the plain mean over the replicas has to be right.
    """

    @staticmethod
    def unscale_loss_for_distribution(value: Any) -> Any:
        step = steps.current()
        if step is not None and step.in_keras_step and step.static_rows is None:
            return value
        return keras_loss.unscale_loss_for_distribution(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(keras_loss, name)


def _next_seed(original: Any, generator: Any, ordered: bool = True) -> Any:
    """Gives every replica random numbers of its own; those of replica 0 are those of a single process."""
    seed = original(generator, ordered)
    step = steps.current()
    if step is None or step.replica_id == 0:
        return seed
    # The golden ratio times 2**32 (Knuth, TAOCP 3, 6.4): far from the small seeds that people choose.
    offset = (step.replica_id * 0x9E3779B1) & 0xFFFFFFFF
    return tf.cast(tf.cast(seed, tf.uint32) + tf.constant([offset, 0], tf.uint32), seed.dtype)


def _add_weight(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Creates the non-trainable state of a layer so that the replicas agree on it (`LayerState`)."""
    if is_ours(tf.distribute.get_strategy()):
        given = inspect.signature(original).bind(layer, *args, **kwargs).arguments
        dtype = keras.backend.standardize_dtype(given.get("dtype") or layer.variable_dtype)
        if given.get("trainable") is False and given.get("aggregation", "none") == "none" and "float" in dtype:
            kwargs["aggregation"] = "mean"
    return original(layer, *args, **kwargs)


def _to_python(original: Any, variable: Any, kind: type) -> Any:
    """`float(variable)` of a mirrored variable, which has no such conversion of its own."""
    if isinstance(variable.value, tf.distribute.DistributedValues) and variable.ndim == 0:
        return kind(variable.value.numpy())
    return original(variable)
