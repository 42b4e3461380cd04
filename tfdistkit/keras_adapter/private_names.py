"""Every private name of Keras and TensorFlow that tfdistkit stands on, with its reason and the upstream issue.

`SEAMS` are functions and classes, `ATTRIBUTES` what objects hold, `OVERRIDES` methods that classes of ours replace in
those of TensorFlow. Tests find each in the installed versions, say which one a new version moved, and find private
names that are used and not listed. `keras_patches` hooks `SEAMS` by key; everything else calls `private_api`.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import NamedTuple


class Seam(NamedTuple):
    """A name that we stand on.

    Args:
        where: `module:attribute`.
        parameters: Those of its parameters that we rely on; empty for what is not called.
        why: What it is for, with the upstream issue where there is one.
    """

    where: str
    parameters: tuple[str, ...]
    why: str


def _where(*places: str) -> str:
    """Returns the first of the places, of newer and older versions, that is there; if none is, the first."""
    for place in places:
        module, _, name = place.partition(":")
        with contextlib.suppress(ImportError):
            found = importlib.import_module(module)
            if not name or hasattr(found, name):
                return place
    return places[0]


# Keras 3.16 renamed `TensorFlowTrainer` to `Trainer`, its base to `BaseTrainer`, and moved operations to `ops`.
_TRAINER = "keras.src.backend.tensorflow.trainer"
_MODEL = _where(f"{_TRAINER}:TensorFlowTrainer", f"{_TRAINER}:Trainer")
_BASE_MODEL = _where("keras.src.trainers.trainer:BaseTrainer", "keras.src.trainers.trainer:Trainer")
_CONTEXT = "tensorflow:distribute.ReplicaContext"
_NUMPY = _where("keras.src.backend.tensorflow.ops.numpy", "keras.src.backend.tensorflow.numpy")
_CORE = _where("keras.src.backend.tensorflow.ops.core", "keras.src.backend.tensorflow.core")
_LAYER = "keras.src.layers.layer:Layer"
_CONTROL_DEPS = "tensorflow.python.framework.auto_control_deps"
_DATASETS = "tensorflow.python.data.ops"
_BATCH_NORM = "keras.src.layers.normalization.batch_normalization:BatchNormalization"
_LOSS = "keras.src.losses.loss"
_VARIABLE = "keras.src.backend.common.variables:Variable"
_OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"
_LOSS_SCALER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_FUNCTIONS = "tensorflow.python.eager.polymorphic_function"
_PS = "tensorflow.python.distribute.parameter_server_strategy_v2"
_MWMS = "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended"
_MIRRORED = "tensorflow.python.distribute.mirrored_strategy:MirroredExtended"
_VALUES = "tensorflow.python.distribute.values:MirroredVariable"

SEAMS: dict[str, Seam] = {
    # Keras: what is hooked.
    "make_function": Seam(f"{_MODEL}._make_function", ("self", "step_function"), "agreed logs and state (keras#20585)"),
    "symbolic_build": Seam(
        f"{_MODEL}._maybe_symbolic_build",
        ("self", "iterator", "data_batch"),
        "MEAN over a batch (keras#20585, keras#20329, keras#21172)",
    ),
    "fit": Seam(f"{_MODEL}.fit", ("self",), "a lost worker is named"),
    "evaluate": Seam(f"{_MODEL}.evaluate", ("self",), "a lost worker is named"),
    "predict": Seam(f"{_MODEL}.predict", ("self",), "a lost worker is named"),
    "train_on_batch": Seam(f"{_MODEL}.train_on_batch", ("self",), "a lost worker is named"),
    "test_on_batch": Seam(f"{_MODEL}.test_on_batch", ("self",), "a lost worker is named"),
    "predict_on_batch": Seam(f"{_MODEL}.predict_on_batch", ("self", "x"), "one prediction for each row"),
    "model_made": Seam(f"{_MODEL}.__init__", ("self",), "the line that made a model in no strategy"),
    "compile": Seam(
        f"{_BASE_MODEL}.compile",
        ("self", "optimizer", "metrics", "weighted_metrics"),
        "variables of optimizers and metrics in the scope of the model",
    ),
    "make_predict_function": Seam(
        f"{_MODEL}.make_predict_function", ("self", "force"), "a replica without rows predicts none"
    ),
    "epoch_iterator": Seam(f"{_TRAINER}:TFEpochIterator.__init__", ("self", "distribute_strategy"), "shuffling seeds"),
    "epoch_steps": Seam(
        "keras.src.trainers.epoch_iterator:EpochIterator._enumerate_iterator", ("self",), "resume in the middle"
    ),
    "epoch_data": Seam(f"{_TRAINER}:TFEpochIterator._get_iterator", ("self",), "how often the data was shuffled"),
    "epoch_logs": Seam(f"{_MODEL}._get_metrics_result_or_logs", ("self", "logs"), "an epoch resumed at its end"),
    "end_epoch": Seam(f"{_TRAINER}:TFEpochIterator._interrupted_warning", ("self",), "datasets that the user sharded"),
    "progress_bar": Seam("keras.src.callbacks.progbar_logger:ProgbarLogger.set_params", ("self", "params"), "one bar"),
    "reduce_per_replica": Seam(
        f"{_TRAINER}:reduce_per_replica", ("values", "strategy", "reduction"), "scalars along axis 0 (tensorflow#72388)"
    ),
    "sum_gradients": Seam(
        "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",
        ("self", "grads_and_vars"),
        "gradients are summed before clipping, accumulation and loss scaling (keras#20582)",
    ),
    "apply": Seam(
        f"{_OPTIMIZER}.apply",
        ("self", "grads", "trainable_variables"),
        "gradients are summed before clipping, accumulation and loss scaling (keras#20582)",
    ),
    "apply_scaled": Seam(
        f"{_LOSS_SCALER}.apply", ("self", "grads", "trainable_variables"), "gradients are summed before they are tested"
    ),
    "apply_finite": Seam(
        f"{_LOSS_SCALER}._tf_apply", ("self", "grads", "trainable_variables"), "eager replicas would sum twice"
    ),
    "common_apply": Seam(
        f"{_LOSS_SCALER}._common_apply", ("self", "grads", "trainable_variables"), "what each replica does alone"
    ),
    "apply_gradients": Seam(
        f"{_OPTIMIZER}.apply_gradients", ("self", "grads_and_vars"), "gradients are summed before an overridden `apply`"
    ),
    "scale_optimizer_loss": Seam(f"{_OPTIMIZER}.scale_loss", ("self", "loss"), "a replica's gradient weighs by rows"),
    "scale_scaled_loss": Seam(f"{_LOSS_SCALER}.scale_loss", ("self", "loss"), "a replica's gradient weighs by rows"),
    "optimizer": Seam(f"{_OPTIMIZER}.__init__", ("self",), "central_storage: whose variables"),
    "optimizer_variable": Seam(f"{_OPTIMIZER}.add_variable", ("self",), "central_storage: whose variables"),
    "loss_call": Seam(f"{_LOSS}:Loss.__call__", ("self", "y_true", "y_pred", "sample_weight"), "losses that mix rows"),
    "reduce_values": Seam(f"{_LOSS}:reduce_values", ("values", "sample_weight", "reduction"), "losses weigh by rows"),
    "apply_mask": Seam(f"{_LOSS}:apply_mask", ("sample_weight", "mask", "dtype", "reduction"), "losses weigh by rows"),
    "reduce_weighted": Seam(f"{_LOSS}:reduce_weighted_values", ("values",), "a loss that is a scalar has no rows"),
    "scale_loss": Seam(f"{_LOSS}:scale_loss_for_distribution", ("value",), "losses weigh by rows"),
    "unscale_loss": Seam(f"{_LOSS}:unscale_loss_for_distribution", ("value",), "losses weigh by rows"),
    "tape_gradient": Seam(
        "tensorflow:GradientTape.gradient", ("self", "target", "sources"), "the gradient of losses of rows is a sum"
    ),
    "context_all_reduce": Seam(
        f"{_CONTEXT}.all_reduce", ("self", "reduce_op", "value", "options"), "a replica without rows adds nothing"
    ),
    "context_all_gather": Seam(f"{_CONTEXT}.all_gather", ("self", "value", "axis"), "state of gathered rows is equal"),
    "compute_average_loss": Seam(
        "tensorflow:nn.compute_average_loss",
        ("per_example_loss", "sample_weight", "global_batch_size"),
        "right in a Keras step, too",
    ),
    "scale_regularization_loss": Seam(
        "tensorflow:nn.scale_regularization_loss", ("regularization_loss",), "right in a Keras step, too"
    ),
    "optimizer_build": Seam(
        "keras.src.optimizers.base_optimizer:BaseOptimizer.build", ("self", "variables"), "state of a reducer"
    ),
    "next_seed": Seam("keras.src.random.seed_generator:SeedGenerator.next", ("self", "ordered"), "keras#20611"),
    "take": Seam(f"{_NUMPY}:take", ("x", "indices", "axis"), "a lookup reads rows, not the whole table"),
    "adagrad_step": Seam(
        "keras.src.optimizers.adagrad:Adagrad.update_step",
        ("self", "gradient", "variable", "learning_rate"),
        "no root of the whole accumulator for the rows of a sparse gradient",
    ),
    "clip_by_global_norm": Seam(
        "keras.src.optimizers.base_optimizer:clip_by_global_norm",
        ("value_list", "clip_norm"),
        "a sparse gradient stays sparse under `global_clipnorm`",
    ),
    "slot": Seam(
        "keras.src.backend.tensorflow.optimizer:TFOptimizer.add_variable_from_reference",
        ("self", "reference_variable"),
        "the slots of a sharded table are parts of one",
    ),
    "save_model": Seam("keras.src.saving.saving_lib:save_model", ("model", "filepath"), "all ranks save to one file"),
    "save_h5": Seam("keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", ("model", "filepath"), "the same"),
    "save_weights": Seam(
        "keras.src.saving.saving_lib:save_weights_only", ("model", "filepath"), "the same for weights"
    ),
    "save_optimizer": Seam(f"{_OPTIMIZER}.save_own_variables", ("self", "store"), "a sharded table is saved as one"),
    "load_optimizer": Seam(f"{_OPTIMIZER}.load_own_variables", ("self", "store"), "a sharded table is saved as one"),
    "add_weight": Seam(f"{_LAYER}.add_weight", ("self", "trainable", "aggregation"), "layer state"),
    "add_loss": Seam(f"{_LAYER}.add_loss", ("self", "loss"), "each eager replica has losses of its own"),
    "own_losses": Seam(f"{_LAYER}._get_own_losses", ("self",), "the same"),
    "clear_losses": Seam(f"{_LAYER}._clear_losses", ("self",), "the same"),
    "to_float": Seam(f"{_VARIABLE}.__float__", ("self",), "float(optimizer.iterations)"),
    "to_int": Seam(f"{_VARIABLE}.__int__", ("self",), "int(optimizer.iterations)"),
    "deferred_capture": Seam(
        "tensorflow.python.ops.control_flow_v2_func_graphs:ControlFlowFuncGraph.capture_call_time_value",
        ("self", "closure", "spec", "key", "default_value"),
        "collectives of a tf.function that is called in a branch (steps_per_execution)",
    ),
    "cond": Seam("tensorflow.python.ops.cond_v2:cond_v2", ("pred", "true_fn", "false_fn"), "one branch for all"),
    "assign_moving_average": Seam(
        "tensorflow.python.training.moving_averages:assign_moving_average",
        ("variable", "value", "decay", "zero_debias", "name"),
        "sums and uneven rows, as in one process",
    ),
    "masked_moments": Seam(f"{_BATCH_NORM}._moments", ("self", "inputs", "mask"), "`synchronized` with a mask"),
    # Keras: what is called.
    "stateless_scope": Seam("keras.src.backend.common.stateless_scope:get_stateless_scope", (), "rows of a table"),
    "slot_index": Seam(f"{_OPTIMIZER}._get_variable_index", ("self", "variable"), "rows of a slot of Adagrad"),
    "layers": Seam(f"{_LAYER}._flatten_layers", ("self",), "is a backup of the same model?"),
    "compile_arguments": Seam("keras.src.saving.serialization_lib:SerializableDict", (), "is it of the same losses?"),
    "model_build": Seam(f"{_MODEL}._symbolic_build", ("self", "data_batch"), "a model is built from shapes"),
    "variable_value": Seam(f"{_VARIABLE}.value", (), "no lost updates: Keras's assign_add is assign(self + v)"),
    "variable_assign": Seam(f"{_CORE}:Variable._direct_assign", ("self", "value"), "no lost updates"),
    "metric": Seam("keras.src.metrics.metric:Metric.__init__", ("self",), "metrics see the rows of all replicas"),
    "metric_variable": Seam(
        "keras.src.metrics.metric:Metric.add_variable", ("self", "aggregation"), "state that is the same on all"
    ),
    "metric_function": Seam(
        "keras.src.metrics.reduction_metrics:MeanMetricWrapper", ("fn",), "functions as metrics see all rows"
    ),
    "metrics_list": Seam("keras.src.trainers.compile_utils:MetricsList", ("metrics",), "metrics that hold metrics"),
    "compile_metrics": Seam("keras.src.trainers.compile_utils:CompileMetrics", ("metrics",), "the same"),
    "keras_mask": Seam("keras.src.backend.common.masking:set_keras_mask", ("x", "mask"), "masks of gathered rows"),
    "variable_autocast": Seam(f"{_VARIABLE}._maybe_autocast", ("self", "value"), "no lost updates"),
    "epoch_end": Seam(f"{_TRAINER}:TFEpochIterator.tf_sync", ("self",), "an epoch ends with its steps"),
    "thread_state": Seam("keras.src.backend.common.global_state:GLOBAL_STATE_TRACKER", (), "replicas in threads"),
    "data_adapter": Seam("keras.src.trainers.data_adapters.data_adapter:DataAdapter", (), "data that workers read"),
    # TensorFlow: what is overridden.
    "ps_extended": Seam(
        f"{_PS}:ParameterServerStrategyV2Extended._call_for_each_replica",
        ("self", "fn", "args", "kwargs"),
        "parameter_server: the inline replica",
    ),
    "mwms_initialize": Seam(f"{_MWMS}._initialize_multi_worker", ("self", "cluster_resolver"), "multiworker"),
    "mwms_run": Seam(f"{_MWMS}._call_for_each_replica", ("self", "fn", "args", "kwargs"), "the inline replica"),
    "mwms_merge": Seam(f"{_MWMS}._use_merge_call", ("self",), "collectives in branches (keras#20582)"),
    "mwms_sum": Seam(f"{_MWMS}._replica_ctx_all_reduce", ("self", "reduce_op", "value", "options"), "one replica"),
    "mwms_gather": Seam(
        f"{_MWMS}._gather_to_implementation", ("self", "value", "destinations", "axis", "options"), "gather of bfloat16"
    ),
    "mwms_variable": Seam(f"{_MWMS}._create_variable", ("self", "next_creator"), "layer state"),
    "mirrored_run": Seam(f"{_MIRRORED}._call_for_each_replica", ("self", "fn", "args", "kwargs"), "weights by rows"),
    "mirrored_merge": Seam(f"{_MIRRORED}._use_merge_call", ("self",), "collectives in branches (keras#20582)"),
    "mirrored_sum": Seam(
        f"{_MIRRORED}._replica_ctx_all_reduce", ("self", "reduce_op", "value", "options"), "sums without merge_call"
    ),
    "mirrored_variable": Seam(
        f"{_MIRRORED}._create_variable", ("self", "next_creator"), "central_storage: a variable on one device"
    ),
    "mirrored_update": Seam(
        f"{_MIRRORED}._replica_ctx_update",
        ("self", "var", "fn", "args", "kwargs", "group"),
        "central_storage: one update",
    ),
    "mwms_replica_id": Seam(f"{_MWMS}._get_replica_id_in_sync_group", ("self", "replica_id"), "rows of a replica"),
    "variable_update": Seam(f"{_VALUES}._update_replica", ("self", "update_fn", "value"), "layer state"),
    "variable_of_replica": Seam(f"{_VALUES}._get_replica", ("self", "replica_id"), "central_storage: one copy"),
    "strategy_scope": Seam(
        "tensorflow.python.distribute.distribute_lib:StrategyBase.scope", ("self",), "scopes in scopes, in clear words"
    ),
    # TensorFlow: what is called.
    "variable_update_all": Seam(
        f"{_VALUES}._update_cross_replica", ("self", "update_fn", "value"), "central_storage: one update"
    ),
    "variable_local": Seam(f"{_VALUES}._get_on_device_or_primary", ("self",), "layer state"),
    "select_replica": Seam(
        "tensorflow.python.distribute.distribute_utils:select_replica", ("replica_id", "structured"), "replicas"
    ),
    "regroup": Seam("tensorflow.python.distribute.distribute_utils:regroup", ("values",), "replicas"),
    "function_context": Seam(
        f"{_FUNCTIONS}.function_context:make_function_context", ("scope_type",), "a trace is of one step alone"
    ),
    "function_call": Seam(f"{_FUNCTIONS}.polymorphic_function:Function.__call__", ("self",), "steps read functions"),
    "loop": Seam("tensorflow.python.ops.control_flow_v2_func_graphs:WhileBodyFuncGraph", (), "all-reduces in a loop"),
    "call_time_value": Seam(
        "tensorflow.python.framework.func_graph:FuncGraph.capture_call_time_value",
        ("self", "closure", "spec"),
        "a tf.function that eager steps call sees the rows of each",
    ),
    "autograph_status": Seam(
        "tensorflow.python.autograph.core.ag_ctx:ControlStatusCtx", ("status",), "a tf.function given to strategy.run"
    ),
    "batch_size": Seam(
        "tensorflow.python.data.experimental.ops.distribute:compute_batch_size", ("dataset",), "arrays kept safe"
    ),
    "is_mirrored": Seam("tensorflow.python.distribute.distribute_utils:is_mirrored", ("val",), "horovod"),
    "checkpoint_value": Seam("tensorflow.python.trackable.base:CheckpointInitialValue", (), "horovod"),
    "mwms_local": Seam(f"{_MWMS}._initialize_local", ("self", "cluster_resolver", "devices"), "horovod"),
    "mwms_reduce": Seam(f"{_MWMS}._reduce_to", ("self", "reduce_op", "value", "destinations", "options"), "horovod"),
    "mwms_initial": Seam(
        f"{_MWMS}._get_variable_creator_initial_value", ("self", "replica_id", "device", "primary_var"), "horovod"
    ),
    "all_reduce": Seam(
        "tensorflow.python.ops.collective_ops:all_reduce_v2",
        ("t", "timeout", "max_subdivs_per_device"),
        "a deadline without a thread for each, large sums in more pieces",
    ),
    "all_gather": Seam(
        "tensorflow.python.ops.collective_ops:all_gather_v2", ("t", "timeout"), "a deadline without a thread for each"
    ),
    "all_to_all": Seam("tensorflow.python.ops.collective_ops:all_to_all_v2", ("t", "timeout"), "compressed gradients"),
    "launch_all_reduce": Seam(
        "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher.all_reduce",
        ("self", "input_tensor"),
        "memory that does not grow with every step",
    ),
    "instance_key": Seam(
        "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher._next_instance_key",
        ("self",),
        "the same",
    ),
    "abort": Seam("tensorflow.python.eager.context:Context.abort_collective_ops", ("self", "code", "message"), "same"),
    "report": Seam(
        "tensorflow.python.eager.context:Context.report_error_to_cluster",
        ("self", "error_code", "error_message"),
        "an error of collectives that one rank alone sees ends them on all",
    ),
    "coordination": Seam(
        "tensorflow.python.eager.context:Context.configure_coordination_service",
        ("self", "service_type", "service_leader", "cluster_register_timeout_in_ms", "coordinated_jobs"),
        "a deadline for the start (tensorflow#46931)",
    ),
    "remote_value": Seam(
        "tensorflow.python.distribute.coordinator.values:RemoteValueImpl._wait_and_maybe_error",
        ("self",),
        "parameter_server: waiting for a step with a deadline",
    ),
    "remote_value_get": Seam(
        "tensorflow.python.distribute.coordinator.values:RemoteValueImpl.get",
        ("self",),
        "parameter_server: the next step need not wait for the results of the last, and hearing of its end",
    ),
    "worker_resource": Seam(
        "tensorflow.python.distribute.coordinator.cluster_coordinator:Worker.create_resource",
        ("self", "function", "args", "kwargs"),
        "parameter_server: an input pipeline of its own for each worker",
    ),
    "worker_iterators": Seam(
        "tensorflow.python.distribute.coordinator.values:PerWorkerDistributedIterator", (), "the same"
    ),
    "function_counts": Seam(
        "tensorflow.python.eager.polymorphic_function.atomic_function:RUNTIME_FUNCTION_REFS",
        (),
        "parameter_server: a coordinator that ends says nothing of functions on workers that are gone",
    ),
    "executor": Seam(
        "tensorflow.python.eager.executor:new_executor",
        ("enable_async",),
        "parameter_server: no waiting for operations of other threads",
    ),
    "thread_executor": Seam("tensorflow.python.eager.context:Context.executor", (), "the same"),
    "global_seed": Seam("tensorflow.python.eager.context:global_seed", (), "shuffling seeds"),
    "arrays": Seam(
        "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter", ("shuffle",), "an order for each epoch"
    ),
    "dataset_inputs": Seam("tensorflow.python.data.ops.dataset_ops:DatasetV2._inputs", ("self",), "the same"),
    "parallel_interleave": Seam(
        "tensorflow.python.data.ops.interleave_op:_ParallelInterleaveDataset.__init__",
        ("self", "deterministic"),
        "it does not keep whether it has an order",
    ),
    "device_dataset": Seam(f"{_DATASETS}.multi_device_iterator_ops:_create_device_dataset", (), "autotuning stalls it"),
    "dataset_graph": Seam(
        "tensorflow.python.data.ops.dataset_ops:DatasetV2._as_serialized_graph",
        ("self", "external_state_policy"),
        "random sources behind a variant tensor",
    ),
    "dataset_function": Seam(
        "tensorflow.python.data.ops.structured_function:StructuredFunctionWrapper.function",
        (),
        "random sources in the functions of datasets",
    ),
    "variant_dataset": Seam(
        "tensorflow.python.data.ops.dataset_ops:_VariantDataset",
        ("dataset_variant",),
        "random sources behind a variant tensor",
    ),
    "random_dataset": Seam("tensorflow.python.data.ops.random_op:_RandomDataset", ("seed",), "random sources"),
    "create_op": Seam(
        "tensorflow.python.framework.ops:Graph._create_op_internal",
        ("self", "op_type", "inputs", "attrs"),
        "the check of steps: random numbers that do not depend on the number of rows",
    ),
    "graph_function": Seam(
        "tensorflow.python.framework.ops:Graph._get_function", ("self", "name"), "random sources in nested functions"
    ),
    "tensors_dataset": Seam(
        "tensorflow.python.data.ops.from_tensors_op:_TensorDataset", ("element",), "do ranks read the same arrays?"
    ),
    "slices_dataset": Seam(
        "tensorflow.python.data.ops.from_tensor_slices_op:_TensorSliceDataset", ("element",), "the same"
    ),
}


class Attributes(NamedTuple):
    """Private attributes of one class that are read or written.

    Args:
        where: `module:class`.
        names: The attributes, which the class or what it inherits from defines, or sets on `self`.
        why: What they are for.
    """

    where: str
    names: tuple[str, ...]
    why: str


_ITERATOR = f"{_TRAINER}:TFEpochIterator"
_REMOTE = "tensorflow.python.distribute.coordinator.values:RemoteValueImpl"
_EXTENDED = "tensorflow.python.distribute.distribute_lib:StrategyExtendedV1"

ATTRIBUTES: tuple[Attributes, ...] = (
    Attributes(
        _ITERATOR,
        ("_current_iterator", "_distribute_strategy", "_distributed_dataset", "_get_iterator", "_num_batches"),
        "what an epoch reads, and when it ends",
    ),
    Attributes(_ITERATOR, ("_interrupted_warning", "_steps_seen"), "an epoch that ends with its data, or was resumed"),
    Attributes(
        "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter", ("_shuffle",), "arrays without a seed"
    ),
    Attributes(
        "keras.src.trainers.data_adapters.tf_dataset_adapter:TFDatasetAdapter", ("_dataset",), "the user's dataset"
    ),
    Attributes(_BASE_MODEL, ("_compile_config", "_symbolic_build"), "built as Keras does"),
    Attributes(_BASE_MODEL, ("_compile_loss",), "the weights of batches in the losses of several outputs"),
    Attributes(_LAYER, ("_flatten_layers", "_inbound_nodes"), "the layers of a model, and how they are connected"),
    Attributes(_MODEL, ("_distribute_strategy",), "the strategy of a model"),
    Attributes(_VARIABLE, ("_value", "_maybe_autocast"), "TensorFlow's variable behind Keras's"),
    Attributes("keras.src.metrics.reduction_metrics:MeanMetricWrapper", ("_fn", "_fn_kwargs"), "is it Keras's own?"),
    Attributes("keras.src.losses.losses:LossFunctionWrapper", ("_fn_kwargs",), "does it combine rows?"),
    Attributes(_OPTIMIZER, ("_trainable_variables",), "the variables of a reducer's gradients"),
    Attributes("keras.src.optimizers.adagrad:Adagrad", ("_accumulators", "_get_variable_index"), "rows of a table"),
    Attributes(_LOSS_SCALER, ("_common_apply",), "what each replica does alone"),
    Attributes(
        "tensorflow.python.distribute.distribute_lib:ReplicaContextBase", ("_replica_id_in_sync_group",), "a number"
    ),
    Attributes(
        f"{_PS}:ParameterServerStrategyV2Extended", ("_num_ps", "_num_replicas_in_sync"), "how many servers there are"
    ),
    Attributes(_EXTENDED, ("_container_strategy",), "the strategy of its extended part"),
    Attributes(_MWMS, ("_cross_device_ops", "_get_replica_id_in_sync_group"), "which replicas are here, how they meet"),
    Attributes(_VALUES, ("_get_on_device_or_primary", "_aggregation"), "a replica's own copy of a variable"),
    Attributes("tensorflow.python.distribute.values:DistributedVariable", ("_distribute_strategy",), "whose it is"),
    Attributes("tensorflow.python.distribute.values:PerReplicaSpec", ("_value_specs",), "a batch that is read ahead"),
    Attributes(
        "tensorflow.python.distribute.cross_device_utils:CollectiveReplicaLauncher",
        ("_collective_keys", "_device", "_get_ordering_token", "_group_key", "_group_size", "_options"),
        "keys of collectives that are used again, and collectives that TensorFlow's strategies do not launch",
    ),
    Attributes("tensorflow.python.distribute.cross_device_ops:CollectiveAllReduce", ("_launchers",), "the same"),
    Attributes(
        "tensorflow.python.distribute.coordinator.cluster_coordinator:ClusterCoordinator", ("_cluster",), "workers"
    ),
    Attributes(_REMOTE, ("_error", "_has_fetched_to_local", "_status_available_event", "_type_spec"), "in flight"),
    Attributes("tensorflow.python.framework.ops:Operation", ("_add_control_input",), "side effects of one replica"),
    Attributes(f"{_CONTROL_DEPS}:AutomaticControlDependencies", ("run_independently",), "the same"),
    Attributes("tensorflow.python.eager.context:Context", ("_context_handle",), "has TensorFlow started?"),
    Attributes(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function",
        ("_autograph", "_clone", "_jit_compile"),
        "the user's tf.function, traced for one step",
    ),
    Attributes(f"{_DATASETS}.structured_function:StructuredFunctionWrapper", ("_func",), "where it was written"),
    Attributes(f"{_DATASETS}.dataset_ops:DatasetV2", ("_functions", "_variant_tensor"), "what a dataset is made of"),
    Attributes(f"{_DATASETS}.shuffle_op:_ShuffleDataset", ("_seed", "_seed2"), "random sources"),
    Attributes(f"{_DATASETS}.map_op:_ParallelMapDataset", ("_deterministic",), "does it have an order?"),
    Attributes(f"{_DATASETS}.from_tensors_op:_TensorDataset", ("_tensors",), "do ranks read the same arrays?"),
    Attributes(f"{_DATASETS}.from_tensor_slices_op:_TensorSliceDataset", ("_tensors",), "the same"),
    Attributes(f"{_DATASETS}.cache_op:CacheDataset", ("_filename",), "do ranks fill the same file?"),
)

# Attributes that we set on objects of Keras and TensorFlow; Keras 3.15 has no `_epoch`, by which 3.16 shuffles.
OWN_ATTRIBUTES = ("_tfdistkit_needs", "_sloppy", "_epoch")

# Methods that classes of ours override in those of TensorFlow, which calls them.
OVERRIDES: tuple[Attributes, ...] = (
    Attributes(
        _EXTENDED,
        (
            "_batch_reduce_to", "_call_for_each_replica", "_create_variable", "_gather_to_implementation", "_reduce_to",
            "_replica_ctx_all_reduce", "_replica_ctx_update", "_use_merge_call",
        ),
        "replicas that run inline and talk by collectives",
    ),
    Attributes(_MWMS, ("_get_variable_creator_initial_value", "_initialize_local"), "horovod"),
    Attributes(_MIRRORED, ("_get_variable_creator_initial_value",), "variables of several devices"),
    Attributes(_VALUES, ("_get", "_update_replica", "_update_cross_replica"), "state that replicas agree on"),
)  # fmt: skip
