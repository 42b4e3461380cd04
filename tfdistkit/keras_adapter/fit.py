"""Hooks of `fit` for callbacks that wrap `fit`, resume inside an epoch, or write files; builds a model ahead of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistkit import env
from tfdistkit.data.batch_info import info_of
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.keras_adapter import data_position, private_api
from tfdistkit.report.hangs import notes
from tfdistkit.report.hangs.layout import Phase

_LOG = logging.getLogger(__name__)

# The epoch that `fit` begins next; None outside of `fit`.
_next_epoch: int | None = None

# Keras callbacks that write files, and their replacements; also for subclasses.
_INSTEAD = {
    "ModelCheckpoint": "tfdistkit.callbacks.ChiefCheckpoint(...)",
    "BackupAndRestore": "tfdistkit.callbacks.BackupAndResume(...)",
    "TensorBoard": "tfdistkit.callbacks.ChiefOnly(keras.callbacks.TensorBoard(...))",
    "CSVLogger": "tfdistkit.callbacks.ChiefOnly(keras.callbacks.CSVLogger(...))",
}


@contextlib.contextmanager
def arguments_of_fit(original: Any, model: Any, args: tuple, kwargs: dict) -> Iterator[inspect.BoundArguments]:
    """Enters the `tfdistkit_wrap_fit` of each callback, which may change the arguments of `fit`.

    Args:
        original: Keras's `fit`.
        model: The model.
        args: The user's positional arguments.
        kwargs: The user's keyword arguments.

    Yields:
        The arguments for `fit`.

    Raises:
        OptionError: if a distributed dataset comes with targets or weights.
        UnsupportedError: in an elastic job, if `fit` does not resume.
    """
    call = inspect.signature(original).bind(model, *args, **kwargs)
    _require_no_weights(call.arguments)
    given = call.arguments.get("callbacks")
    callbacks = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given or [])
    warn_of_shared_files(model.distribute_strategy, callbacks)
    require_resumption(model.distribute_strategy, callbacks)
    with contextlib.ExitStack() as stack:
        for one in list(callbacks):
            if hasattr(one, "tfdistkit_wrap_fit"):
                stack.enter_context(one.tfdistkit_wrap_fit(model, call.arguments))
        yield call


def _require_no_weights(arguments: dict[str, Any]) -> None:
    """Checks that nothing comes beside a dataset that the user distributed: Keras cannot add it to its batches."""
    given = [name for name in ("y", "sample_weight", "class_weight") if arguments.get(name) is not None]
    if given and isinstance(arguments.get("x"), tf.distribute.DistributedDataset):
        raise OptionError(
            explain(
                "Targets and weights must be in the elements of a dataset that you distribute.",
                received=f"{', '.join(given)} beside a {type(arguments['x']).__name__}",
                expected="elements (x, y, sample_weight), or a dataset that `fit` distributes itself",
                do="Map the weights into the dataset: `dataset.map(lambda x, y: (x, y, tf.gather(weights, y)))`.",
            )
        )


@contextlib.contextmanager
def noting_epochs(initial_epoch: int) -> Iterator[None]:
    """Notes that its body is a `fit`, and its epochs.

    Args:
        initial_epoch: The epoch that it begins with, from 0.
    """
    global _next_epoch
    before, _next_epoch = _next_epoch, initial_epoch
    notes.own.enter(Phase.BETWEEN)
    try:
        yield
    finally:
        _next_epoch = before
        notes.own.enter(Phase.OUTSIDE)


def epoch_steps(original: Any, iterator: Any) -> Any:
    """Yields the steps of an epoch, from the position of a callback that resumes training."""
    _note_epoch()
    info = info_of(iterator)
    read = original if info.generator is None else functools.partial(info.generator.steps, original)
    if info.validated is not None:
        read = functools.partial(info.validated.validate, read)
    steps = read(iterator) if info.position is None else info.position.steps(read, iterator)
    return steps if info.comparison is None else info.comparison.steps(iterator, steps)


def _note_epoch() -> None:
    """Notes an epoch of `fit`; evaluations have epochs, too."""
    global _next_epoch
    if _next_epoch is not None and notes.own.phase != Phase.EVALUATION:
        notes.own.begin_epoch(_next_epoch)
        _next_epoch += 1


def epoch_data(original: Any, iterator: Any) -> Any:
    """Counts an iterator over training data, or checks one over other data."""
    position = info_of(iterator).position
    if position is not None:
        position.count_iterator()
    else:
        data_position.check_other_iterator(iterator)
    return original(iterator)


def epoch_logs(original: Any, model: Any, logs: Any) -> Any:
    """Returns the logs of an epoch; those from before a restart if its last step ran before."""
    return original(model, logs or data_position.kept_logs(model))


def one_progress_bar(original: Any, bar: Any, params: Any) -> None:
    """Shows the progress bar of `fit`, `evaluate` and `predict` on the chief only: the bars of all ranks are equal."""
    original(bar, params)
    strategy: Any = getattr(bar.model, "distribute_strategy", None)
    if private_api.is_ours(strategy) and not strategy.extended.should_checkpoint:
        bar.verbose = 0


def require_resumption(strategy: Any, callbacks: Iterable[Any]) -> None:
    """Refuses a `fit` that begins anew at each change of the number of workers.

    Args:
        strategy: The strategy of the model.
        callbacks: The callbacks of `fit`.

    Raises:
        UnsupportedError: in an elastic job, if no callback resumes training.
    """
    elastic = env.text(env.ELASTIC)
    if elastic is None or not private_api.is_ours(strategy):
        return
    if not any(getattr(one, "tfdistkit_resumes", False) for one in callbacks):
        raise UnsupportedError(
            explain(
                "`callbacks` of `fit` must have a BackupAndResume in a job whose number of workers may change.",
                received=f"a `fit` without it, and {elastic.replace(':', ' to ')} workers",
                do='Add it: model.fit(..., callbacks=[tfdistkit.callbacks.BackupAndResume("backup", save_freq="10 '
                'minutes")])',
            )
        )


def warn_of_shared_files(strategy: Any, callbacks: Iterable[Any]) -> None:
    """Warns, on the chief and once per process, of Keras callbacks that write the same files on every rank.

    Args:
        strategy: The strategy of the model.
        callbacks: The callbacks of `fit`.
    """
    if not private_api.is_ours(strategy):
        return
    several = strategy.num_replicas_in_sync > len(strategy.extended.worker_devices)
    if not several or not strategy.extended.should_checkpoint:
        return
    of_keras = [one for one in callbacks if not type(one).__module__.startswith("tfdistkit.")]
    for callback in of_keras:
        for name, instead in _INSTEAD.items():
            if isinstance(callback, getattr(keras.callbacks, name)):
                _warn(name, instead)


@functools.cache
def _warn(name: str, instead: str) -> None:
    _LOG.warning(
        "%s writes on every rank of this job: ranks that share a disk overwrite each other's file. Pass `fit` %s on "
        "every rank, or a separate file name on each.",
        name,
        instead,
    )


# Of TensorFlow's error for a result of `tf.py_function`, of which Keras asks the shape.
_NO_SHAPE = "as_list() is not defined on an unknown TensorShape"


def build_model(model: Any, batch: Any) -> None:
    """Builds a model from something with the shapes and dtypes of a batch.

    With `run_eagerly=True`, losses and metrics may need values (`float(loss)`), what a loop of a tf.function writes to
    a metric has no value outside of the loop, and Python code (`tf.py_function`) returns a result of unknown shape: in
    one process Keras does not build ahead of the step. They are left to the first step, and metrics forget what they
    were built from.
    """
    unbuilt = [one for one in model.metrics if not getattr(one, "built", True)]  # Those of `compile`.
    arguments = private_api.compile_arguments(model)
    given = [arguments.get("metrics"), arguments.get("weighted_metrics")]
    own = [v for one in keras.tree.flatten(given) if isinstance(one, keras.metrics.Metric) for v in one.variables]
    initial = [variable.numpy() for variable in own] if unbuilt and model.run_eagerly else []
    try:
        private_api.build_model(model, batch)
    except Exception as error:
        is_left = model.run_eagerly or type(error).__name__ == "InaccessibleTensorError" or _NO_SHAPE in str(error)
        if not (is_left and all(layer.built for layer in private_api.layers_of(model))):
            raise
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    built = [metric for metric in unbuilt if metric.built]
    for metric in built if model.run_eagerly else ():
        metric.reset_state()
    for variable, value in zip(own, initial):
        variable.assign(value)
    for metric in built:
        _keep_initial_values(metric)


def _keep_initial_values(metric: Any) -> None:
    """Lets the metrics of `compile` begin with the initial values of their variables, as in one process.

    Keras resets the metrics before the first step, but not those that it has not built yet. A metric of the user's own
    whose `reset_state` it inherits, which writes zeros, may begin with another value, such as that of a minimum.
    """

    initial = [variable.numpy().tobytes() for variable in metric.variables]

    def keep_once() -> None:
        del metric.reset_state
        # `train_on_batch` of Keras 3.10 does not reset them, so that this may be a later call of the user's.
        if [variable.numpy().tobytes() for variable in metric.variables] != initial:
            metric.reset_state()

    metric.reset_state = keep_once
