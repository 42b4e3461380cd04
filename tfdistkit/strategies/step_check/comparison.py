"""Compares what a step changes on all replicas with one process, on a few rows of the first batch.

The rules of gradients and of state (docs/exactness.md) are exact for what can be read from the graph. This check finds
the rest, whatever the reason: it compares gradients, and what the step writes to state of layers, and does not read how
the step computes them. One process is a replica that has all rows, while the others have none and add nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.errors import UnsupportedError
from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.consistency.read_ahead import read_ahead
from tfdistkit.strategies.consistency.row_exchange import table
from tfdistkit.strategies.step_check.differences import other_gradient, other_log, other_state
from tfdistkit.strategies.step_check.own_code import trains_by_own_code
from tfdistkit.strategies.step_check.small_batch import SmallBatch, small_batches
from tfdistkit.strategies.step_check.trial_steps import TrialStep
from tfdistkit.strategies.sync.gradients.trial import CannotTryError

_LOG = logging.getLogger(__name__)

# Differences that are ignored: relative to a gradient's norm, or to a part of the largest norm of all.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
_PART_OF_LARGEST = 1e-2
# What is 0 but for rounding differs by rounding: gradients of a loss at its minimum, the mean of centred rows. So
# differences count relative to this norm at least, and those of a change relative to a part of the new value.
_LEAST_NORM, _PART_OF_VALUE = 1e-3, 1e-4
_HALF = ("float16", "bfloat16")
_STEPS = 2


class StepCheck:
    """The check of the train function of a model, in its first steps.

    Args:
        model: The model.
        step_function: Its train step.
        is_stock: Whether it is Keras's own.
    """

    def __init__(self, model: Any, step_function: Callable[[Any], Any], is_stock: bool):
        self._model, self._step_function, self._is_stock = model, step_function, is_stock
        self._steps_left = _STEPS if _is_wanted(model) else 0

    def before_step(self, iterator: Any) -> Any:
        """Checks the step before it runs, if it is to be checked; all ranks call it.

        It is the first one, or the second, if the first one builds layers. (Layers that no step uses are never built.)

        Args:
            iterator: What the train function reads: an iterator over elements of the replicas.

        Returns:
            An iterator that begins with the same element.

        Raises:
            UnsupportedError: on all ranks, if the gradients differ.
        """
        if not self._steps_left:
            return iterator
        self._steps_left -= 1
        # A model without `call` is never built itself.
        layers = [layer for layer in private_api.layers_of(self._model) if layer is not self._model]
        if self._steps_left and not all(layer.built for layer in layers):
            return iterator
        iterator, elements = self._read(iterator)
        if elements:
            self.check(elements)
        return iterator

    def _read(self, iterator: Any) -> tuple[Any, list[Any]]:
        strategy = self._model.distribute_strategy
        if isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            iterator, batches = read_ahead(strategy, iterator, self._model.steps_per_execution)
            return iterator, batches[0] if batches else []
        values = list(iterator)
        replicas = range(len(strategy.extended.worker_devices))
        return iter(values), [private_api.select_replica(i, values[0]) for i in replicas] if values else []

    def check(self, elements: list[Any]) -> None:
        """Checks the step; all ranks call it.

        Args:
            elements: The first element of the data of each replica of this process.

        Raises:
            UnsupportedError: on all ranks, if the gradients or the state differ.
        """
        self._steps_left = 0
        try:
            error = self._difference(elements)
        except CannotTryError as reason:
            _warn_unchecked(self._model, str(reason))
            return
        if error is not None:
            raise error

    def _difference(self, elements: list[Any]) -> UnsupportedError | None:
        batches = small_batches(self._model.distribute_strategy, elements)
        trial = self._trial(batches)
        error = self._difference_of(trial, batches)
        # A later batch may take the other branch of a condition.
        for branch in (True, False) if trial.has_branches else ():
            with contextlib.suppress(CannotTryError):
                error = error or self._difference_of(self._trial(batches, branch), batches, branch)
        return error

    def _trial(self, batches: list[SmallBatch], branch: bool | None = None) -> TrialStep:
        strategy, first = self._model.distribute_strategy, batches[0].split
        trial, why = None, ""
        try:
            trial = TrialStep(strategy, self._model, self._step_function, self._is_stock, first, branch)
        except Exception as error:  # Any exception of the user's code: the real step will raise it again.
            why = str(error) or type(error).__name__
        if _is_anywhere(strategy, bool(why)):
            raise CannotTryError(why or "another rank cannot try it")
        assert trial is not None
        return trial

    def _difference_of(
        self, trial: TrialStep, batches: list[SmallBatch], branch: bool | None = None
    ) -> UnsupportedError | None:
        self._try_local_part(trial, batches)
        warning = None
        for batch in batches:
            found = self._difference_on(trial, batch, branch)
            if isinstance(found, UnsupportedError):
                return found
            warning = warning or found
        if warning:
            warnings.warn(warning, stacklevel=2)
        return None

    def _difference_on(self, trial: TrialStep, batch: SmallBatch, branch: bool | None) -> UnsupportedError | str | None:
        """Returns the error for what differs, or the warning if that is only a value in the logs."""
        strategy = self._model.distribute_strategy
        try:
            own, wanted = trial.run(batch.split), trial.run(batch.on_first)
        except tf.errors.OpError as error:
            raise _failed(error) from error
        tolerance = _HALF_TOLERANCE if self._model.dtype_policy.compute_dtype in _HALF else _TOLERANCE
        least_gradient = max(_PART_OF_LARGEST * wanted[0][:, -2].max(initial=0.0), _LEAST_NORM)
        least_norms = (least_gradient, _LEAST_NORM, _LEAST_NORM)
        found = [_largest(*numbers) for numbers in zip(own, wanted, least_norms)]
        differs = [_is_anywhere(strategy, size > tolerance) for _, size in found]
        if differs[0]:
            may_skip = private_api.may_skip_steps(self._model.optimizer)
            if _is_anywhere(strategy, may_skip and not np.isfinite(own[0]).all()):
                raise CannotTryError("its gradients overflow with this loss scale, so the optimizer skips the step")
            return other_gradient(self._model, trial.variables[found[0][0]], found[0][1], branch)
        if differs[1]:
            return other_state(self._model, trial.written[found[1][0]], found[1][1], branch)
        if differs[2]:
            return other_log(self._model, trial.logged[found[2][0]], found[2][1], branch)
        return None

    def _try_local_part(self, trial: TrialStep, batches: list[SmallBatch]) -> None:
        """Fails on all ranks if the step fails on a rank: the others would wait for it in a collective."""
        strategy = self._model.distribute_strategy
        failed: CannotTryError | None = None
        if strategy.num_replicas_in_sync == len(strategy.extended.worker_devices):
            return
        try:
            for elements in itertools.chain(*batches):
                trial.run_local_part(elements)
        except tf.errors.OpError as error:
            failed = _failed(error)
        except Exception as error:  # The check must not end a training that is right.
            failed = CannotTryError(f"it cannot be run on this rank alone: {str(error) or type(error).__name__}")
        if _is_anywhere(strategy, failed is not None):
            raise failed or CannotTryError("it fails on a few rows of another rank")


def _failed(error: tf.errors.OpError) -> CannotTryError:
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    what = next((line for line in lines if not line.startswith(("Graph execution error", "Detected at", "File "))), "")
    return CannotTryError(f"it fails on a few rows: {what}")


def _is_wanted(model: Any) -> bool:
    strategy = model.distribute_strategy
    if not strategy.check_step or strategy.reducer.is_local or not trains_by_own_code(model):
        return False
    if model.run_eagerly or model.jit_compile is True:
        _warn_unchecked(model, "run_eagerly=True" if model.run_eagerly else "jit_compile=True")
        return False
    return True


def _warn_unchecked(model: Any, reason: str) -> None:
    _LOG.warning(
        "The first step of %r is not compared with one process: %s. Its code must compute the gradients of one process "
        'by itself (docs/exactness.md, "What cannot be detected").',
        model.name,
        reason.rstrip("."),
    )


def _is_anywhere(strategy: Any, flag: bool) -> bool:
    """Returns whether a condition holds on any rank."""
    if strategy.num_replicas_in_sync == len(strategy.extended.worker_devices):
        return flag
    return bool(table(strategy, np.array([flag], np.int64)).any())


def _largest(numbers: np.ndarray, wanted: np.ndarray, least_norm: float) -> tuple[int, float]:
    """Returns the variable that differs most, and by how much of its norm, or of the least that counts."""
    if not len(wanted):
        return 0, 0.0
    scale = np.maximum(np.maximum(wanted[:, -2], _PART_OF_VALUE * wanted[:, -1]), least_norm)
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.abs(numbers[:, :-2] - wanted[:, :-2]).max(1) / scale
    # What is not finite in one process, either, is no difference.
    sizes = np.where(np.isfinite(wanted).all(1), np.where(np.isfinite(sizes), sizes, np.inf), 0.0)
    return int(sizes.argmax()), float(sizes.max())
