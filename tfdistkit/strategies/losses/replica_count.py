"""Warns of a step of `fit` that reads the number of replicas, as one does that divides its loss by it.

TensorFlow's strategies add up gradients, so that a `train_step` for them divides by the number of replicas. In a Keras
step of ours gradients meet as their mean, weighted by rows, and such a step would train with smaller gradients. The
comparison of the first step with one process does not find this: the step divides there, too.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from tfdistkit.errors import explain
from tfdistkit.strategies.sync import step as steps

_LOG = logging.getLogger(__name__)

# Functions that were warned of.
_warned: set[tuple[str, str]] = set()
_OF_LIBRARIES = ("tfdistkit", "keras")


class CountsReplicas:
    """A base of strategies that notes who reads `num_replicas_in_sync`."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""
        step, count = steps.current(), int(super().num_replicas_in_sync)  # type: ignore[misc]
        if step is not None and step.in_keras_step and count > 1:
            _warn_of_reader(count)
        return count


def _warn_of_reader(count: int) -> None:
    frame: Any = sys._getframe(2)
    while frame is not None and _package_of(frame) == "tensorflow":  # `replica_context.num_replicas_in_sync`
        frame = frame.f_back
    if frame is None or _package_of(frame) in _OF_LIBRARIES:
        return
    function, file = frame.f_code.co_name.removeprefix("tf__"), frame.f_code.co_filename
    # What is summed over the replicas may be divided by their number.
    if (function, file) in _warned or {"all_reduce", "merge_call", "reduce"} & set(frame.f_code.co_names):
        return
    _warned.add((function, file))
    _LOG.warning(
        explain(
            f"In `fit` and `evaluate`, `{function}` must not divide by `num_replicas_in_sync`: gradients and logs are "
            "the mean of all replicas already, weighted by rows. It would train with smaller gradients.",
            received=f"`{function}` reads `num_replicas_in_sync`, which is {count}",
            expected="the loss of one process: a mean over the rows, or `tf.nn.compute_average_loss(losses)`",
            do="Remove the division. Loops with `strategy.run` keep it.",
        )
    )


def _package_of(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
