"""Hooks Keras where a strategy of ours needs another behaviour; the names are in `private_names`.

Every hook takes Keras's own function (`original`) first, and only calls it outside of a strategy of ours. So models
without such a strategy behave as before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistkit.data.batch_info import info_of
from tfdistkit.data.generators import ending_readers
from tfdistkit.data.rows import rows_error
from tfdistkit.keras_adapter import (
    dataset_tuning,
    fit,
    private_api,
    private_datasets,
    private_lookup,
    table_parts,
    table_rows,
)
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import Phase
from tfdistkit.strategies import epoch_data, model_scope, variables
from tfdistkit.strategies.consistency.batch_comparison import comparing
from tfdistkit.strategies.consistency.call_positions import fit_together
from tfdistkit.strategies.local_steps import keras_steps
from tfdistkit.strategies.local_steps import logs as local_logs
from tfdistkit.strategies.losses import whole_batch
from tfdistkit.strategies.metrics import metric_patches, metric_results, metrics_of_step
from tfdistkit.strategies.metrics.metric_sync import agree
from tfdistkit.strategies.metrics.output_losses import BatchWeights
from tfdistkit.strategies.parameter_server import atomic_updates, inflight
from tfdistkit.strategies.saving import saved_files
from tfdistkit.strategies.step_check.comparison import StepCheck
from tfdistkit.strategies.step_check.python_state import watching
from tfdistkit.strategies.step_clock import clock_of
from tfdistkit.strategies.sync import (
    batch_sharding,
    collective_keys,
    collective_timeout,
    layer_losses,
    loss_scaling,
    replica,
    step_traces,
)
from tfdistkit.strategies.sync import step as steps
from tfdistkit.strategies.sync.aggregates import (
    global_conditions,
    inlined_functions,
    masked_moments,
    predicted_rows,
    row_sums,
)
from tfdistkit.strategies.sync.batch_sharding import BatchPart
from tfdistkit.strategies.sync.gradients import gradient_scaling, own_optimizers, reducer_state
from tfdistkit.strategies.sync.replica_deadlocks import in_one_thread


@functools.cache
def install() -> None:
    """Hooks Keras, once a process. Called when the first strategy of ours is made.

    Raises:
        UnsupportedError: if a private name that we rely on is missing or was moved.
    """
    private_lookup.check()
    gradient_scaling.weigh_collectives(row_sums.own_rows)
    for key, around in _HOOKS.items():
        private_lookup.hook(key, around)
    model_scope.install()


def _make_function(original: Any, model: Any, step_function: Any) -> Any:
    """Makes a train or test function that writes progress notes, and is measured by the clock of the model, if any."""
    function = _make_measured_function(original, model, step_function)
    if not private_api.is_ours(model.distribute_strategy):
        return function
    return notes.noting_steps(function, None if step_function == model.test_step else model.steps_per_execution)


def _make_measured_function(original: Any, model: Any, step_function: Any) -> Any:
    original = functools.partial(step_traces.make_function, original, BatchWeights(model))
    clock, strategy = clock_of(model, step_function), model.distribute_strategy
    coordinated = strategy.coordinated_function(model, step_function, clock) if private_api.is_ours(strategy) else None
    if coordinated is not None:
        return coordinated
    if clock is None:
        return _make_agreeing_function(original, model, step_function)
    return clock.timed(_make_agreeing_function(original, model, clock.watched(step_function, model)))


def _make_agreeing_function(original: Any, model: Any, step_function: Any) -> Any:
    """Makes a train or test function after whose steps logs and layer state are equal on all replicas.

    Between two averages of an algorithm, each replica keeps its own after a train step.
    """
    strategy = model.distribute_strategy
    if not private_api.is_ours(strategy) or strategy.num_replicas_in_sync == 1:
        return original(model, step_function)
    batch_sharding.require_no_state_of_rows(model)
    if model.jit_compile is True:
        strategy.check_jit_compile()
        collective_timeout.leave_to_tensorflow()

    trains, functions = step_function != model.test_step, {}
    if trains and strategy.reducer.is_local:
        keras_steps.prepare(model)

    def on_parts(iterator: Any) -> Any:
        is_local = trains and keras_steps.are_next(strategy)
        if is_local not in functions:
            if is_local:
                keras_steps.prepare(model)
            functions[is_local] = _make_function_on_parts(original, model, step_function, is_local)
        return functions[is_local](iterator)

    return on_parts


def _make_function_on_parts(original: Any, model: Any, step_function: Any, is_local: bool) -> Any:
    strategy = model.distribute_strategy
    is_stock = gradient_scaling.is_stock_train_step(model, step_function)

    @functools.wraps(step_function)
    def keras_step(data: Any) -> Any:
        step = steps.current()
        if step is None:
            return step_function(data)
        step.model, step.in_test_step = model, step_function == model.test_step
        metric_patches.require_scope(model)
        data = step.begin_keras_step(data, is_stock, is_local)
        if is_local:
            keras_steps.begin(step)
        logs = step_function(data)
        return keras_steps.end(step, logs) if is_local else agree(step, logs)

    @functools.wraps(step_function)
    def step_with_data(data: Any) -> Any:
        with tf.control_dependencies([v for v in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(v)]):
            return keras_step(data)

    function, uncounted_function = (watching(model, original(model, one)) for one in (keras_step, step_with_data))
    check = StepCheck(model, step_function, is_stock) if step_function != model.test_step and not is_local else None

    def on_parts(iterator: Any) -> Any:
        chosen = uncounted_function if info_of(iterator).is_uncounted else function
        # train_on_batch and test_on_batch hand over the global batch, not an iterator over a replica's part.
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            iterator = (_split_batch(strategy, batch) for batch in iterator)
        return chosen(iterator if check is None else check.before_step(iterator))

    return local_logs.of_model(model).traced(on_parts) if is_local else on_parts


def _reduce_per_replica(original: Any, values: Any, strategy: Any, reduction: str) -> Any:
    """Takes logs, which are already equal (`agree`), from the first replica, and so predicted numbers, too."""
    if private_api.is_ours(strategy) and reduction == "auto":
        return keras.tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)
    if not private_api.is_ours(strategy) or reduction != "concat":
        return original(values, strategy, reduction)
    concatenate = functools.partial(original, strategy=strategy, reduction=reduction)
    return predicted_rows.concatenated(concatenate, strategy, values)


def _maybe_symbolic_build(original: Any, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Builds a model from the shapes and dtypes of a batch; Keras reads a batch and averages it over all replicas.

    Averaging fails for every batch under MultiWorkerMirroredStrategy (keras#20585, keras#20329) and for strings and
    integers under MirroredStrategy (keras#21172). A batch that is read for it is missing from the data of a generator.
    """
    strategy = private_api.strategy_of(model)
    if info_of(iterator).position is not None:
        strategy = model.distribute_strategy  # A saved position can only be restored into variables that exist.
    elif not private_api.is_ours(strategy):
        return original(model, iterator=iterator, data_batch=data_batch)
    if iterator is not None:
        data_batch = _batch_like(strategy, iterator)
    else:
        data_batch = keras.tree.map_structure(_with_dtype_of_tensor, data_batch)
    if private_api.is_ours(strategy) and strategy.num_replicas_in_sync > 1:
        batch_sharding.require_no_state_of_rows(model)  # A layer with a fixed number of rows fails to build.
    if type(model).call is keras.Model.call:
        return None  # Only its own train_step knows how to call it (such as that of a GAN).
    with strategy.scope(), reducer_state.building(model):
        try:
            metrics_of_step.build(model, data_batch)
            fit.build_model(model, data_batch)
        except Exception:
            # A custom train_step may pass `call` other inputs than the first tensor of a batch (an anchor, a positive
            # and a negative one), and Keras has no symbolic ragged tensors with TensorFlow's methods. In one process
            # Keras does not build ahead of the step.
            if type(model).train_step is keras.Model.train_step and not batch_sharding.has_ragged(data_batch):
                raise
    return None


def _with_dtype_of_tensor(value: Any) -> Any:
    """Returns a tensor for an array of strings, whose dtype Keras does not know; other values as they are."""
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "OSU" else value


def _batch_like(strategy: Any, iterator: Any) -> Any:
    """Returns something with the shapes and dtypes of one replica's batch, of the same structure."""
    dataset = private_api.dataset_of(iterator)
    spec = info_of(dataset).element_spec
    if isinstance(dataset, tf.data.Dataset):
        spec = dataset.element_spec
        spec = spec.data if isinstance(spec, BatchPart) else spec
    if spec is not None:
        return tf.nest.map_structure(lambda s: s if hasattr(s, "shape") and hasattr(s, "dtype") else None, spec)
    for _, *_, it in iterator:  # A dataset that the user distributed: only a batch can tell.
        return keras.tree.map_structure(lambda v: strategy.experimental_local_results(v)[0], next(it))
    return None


def _split_batch(strategy: Any, batch: Any) -> Any:
    """Splits a global batch, the same on all ranks, into one part for each replica."""

    def part(context: Any) -> Any:
        return batch_sharding.part_of(batch, context.num_replicas_in_sync, context.replica_id_in_sync_group)

    return strategy.experimental_distribute_values_from_function(part)


def _fit(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    one_thread = in_one_thread(model.distribute_strategy, trains=True)
    with one_thread, fit.arguments_of_fit(original, model, args, kwargs) as call:
        keras_steps.require_agreed_stops(model.distribute_strategy, call.arguments.get("callbacks"))
        with fit.noting_epochs(call.arguments.get("initial_epoch", 0)):
            return _name_lost_peer(functools.partial(fit_together, original), *call.args, **call.kwargs)


def _epoch_logs(original: Any, model: Any, logs: Any) -> Any:
    return local_logs.epoch_logs(functools.partial(fit.epoch_logs, original), model, logs)


def _predict_on_batch(original: Any, model: Any, x: Any) -> Any:
    """Lets each replica predict its part of the batch; in Keras each predicts the whole, and all results return."""
    strategy: Any = model.distribute_strategy
    if private_api.is_ours(strategy):
        strategy.settle_weights()
        x = _split_batch(strategy, x) if strategy.num_replicas_in_sync > 1 else x
    return _name_lost_peer(original, model, x)


def _make_predict_function(original: Any, model: Any, force: bool = False) -> None:
    """Marks the steps of `predict` (`steps.predicting`), because Keras has no hook for the step itself."""
    if model.predict_function is not None and not force:
        return
    if not private_api.is_ours(model.distribute_strategy) or model.distribute_strategy.num_replicas_in_sync == 1:
        return original(model, force=force)
    batch_sharding.require_no_state_of_rows(model)
    original(model, force=force)
    function = model.predict_function

    def predict_function(data: Any) -> Any:
        with steps.predicting(model):
            return function(data)

    model.predict_function = predict_function


@ending_readers()
def _name_lost_peer(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces TensorFlow's error about a lost worker by one that names the worker."""
    try:
        return original(model, *args, **kwargs)
    except BaseException as error:
        strategy: Any = model.distribute_strategy
        if not private_api.is_ours(strategy):
            raise
        strategy.abandon_steps()
        if not isinstance(error, tf.errors.OpError):
            raise
        clear = rows_error(str(error.message)) or strategy.explained_error(error)
        if clear is None:
            raise
        raise clear from error


def _cond(original: Any, *args: Any, **kwargs: Any) -> Any:
    metric_results.settle_before_branch(steps.current())
    return global_conditions.cond(original, *args, **kwargs)


def _evaluate(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Evaluates or predicts with equal weights on all replicas, which an algorithm may let differ between steps."""
    strategy: Any = model.distribute_strategy
    if private_api.is_ours(strategy):
        strategy.settle_weights()
    with in_one_thread(strategy, trains=False), notes.noting(Phase.EVALUATION):
        return _name_lost_peer(original, model, *args, **kwargs)


def _optimizer_variable(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Marks variables that are created in the call as those of an optimizer, for a strategy of ours."""
    with reducer_state.scope_of(getattr(optimizer, "variables", ())):  # None before its `__init__`.
        strategy: Any = tf.distribute.get_strategy()
        with strategy.optimizer_variables() if private_api.is_ours(strategy) else contextlib.nullcontext():
            return original(optimizer, *args, **kwargs)


def _optimizer_made(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook of the `__init__` of optimizers: sums gradients before methods of a user's subclass see them."""
    if private_api.is_ours(tf.distribute.get_strategy()):
        own_optimizers.hook_own_methods(type(optimizer))
    return _optimizer_variable(original, optimizer, *args, **kwargs)


def _own_function_context(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Traces a tf.function that a step calls for this step only."""
    of_step = functools.partial(steps.own_function_context, original)
    return atomic_updates.own_function_context(of_step, *args, **kwargs)


_HOOKS: dict[str, Callable[..., Any]] = {
    "all_reduce": collective_keys.all_reduce,
    **dict.fromkeys(("all_gather", "all_to_all"), collective_timeout.around),
    "launch_all_reduce": collective_keys.launch_all_reduce,
    "instance_key": collective_keys.instance_key,
    "function_context": _own_function_context,
    "function_call": inlined_functions.call,
    "make_function": _make_function,
    "symbolic_build": _maybe_symbolic_build,
    "epoch_iterator": epoch_data.make_epoch_iterator,
    "reduce_per_replica": _reduce_per_replica,
    "progress_bar": fit.one_progress_bar,
    "epoch_steps": fit.epoch_steps,
    "epoch_data": fit.epoch_data,
    "epoch_logs": _epoch_logs,
    "fit": _fit,
    "evaluate": _evaluate,
    "predict": _evaluate,
    "train_on_batch": comparing("train_on_batch", _name_lost_peer),
    "test_on_batch": comparing("test_on_batch", _evaluate),
    "predict_on_batch": comparing("predict_on_batch", _predict_on_batch),
    "make_predict_function": _make_predict_function,
    "apply": gradient_scaling.apply,
    "apply_gradients": gradient_scaling.apply_gradients,
    "context_all_reduce": gradient_scaling.all_reduce,
    "context_all_gather": gradient_scaling.all_gather,
    "tape_gradient": gradient_scaling.tape_gradient,
    "scale_optimizer_loss": gradient_scaling.scale_optimizer_loss,
    "scale_scaled_loss": gradient_scaling.scale_optimizer_loss,
    "apply_scaled": gradient_scaling.apply,
    "apply_finite": gradient_scaling.apply_finite,
    "sum_gradients": gradient_scaling.all_reduce_sum_gradients,
    "optimizer_build": reducer_state.build_optimizer,
    "optimizer": _optimizer_made,
    "optimizer_variable": _optimizer_variable,
    "reduce_values": loss_scaling.reduce_values,
    "loss_call": whole_batch.call_loss,
    "reduce_weighted": whole_batch.reduce_weighted_values,
    "apply_mask": loss_scaling.apply_mask,
    "scale_loss": loss_scaling.scale_loss,
    "unscale_loss": loss_scaling.unscale_loss,
    "compute_average_loss": loss_scaling.compute_average_loss,
    "scale_regularization_loss": loss_scaling.scale_regularization_loss,
    "add_loss": layer_losses.add_loss,
    "own_losses": layer_losses.own_losses,
    "clear_losses": layer_losses.clear_losses,
    "next_seed": replica.next_seed,
    "remote_value_get": inflight.fetch_aside,
    "take": table_rows.take,
    "adagrad_step": table_rows.adagrad_step,
    "clip_by_global_norm": table_rows.clip_by_global_norm,
    "slot": reducer_state.slot,
    "save_model": saved_files.save,
    "save_h5": saved_files.save,
    "save_weights": saved_files.save_weights,
    "save_optimizer": table_parts.save_optimizer,
    "load_optimizer": table_parts.load_optimizer,
    "add_weight": replica.add_weight,
    "assign_moving_average": replica.assign_moving_average,
    "to_float": functools.partial(variables.to_python, kind=float),
    "to_int": functools.partial(variables.to_python, kind=int),
    "deferred_capture": collective_keys.capture_in_function,
    "cond": _cond,
    "masked_moments": masked_moments.moments,
    "epoch_end": epoch_data.finish_epoch,
    "variable_value": atomic_updates.value,
    "variable_assign": metric_patches.direct_assign,
    "metric": metric_patches.metric_made,
    "metric_variable": metric_patches.metric_variable,
    "parallel_interleave": private_datasets.note_order,
    "device_dataset": dataset_tuning.of_device,
}
