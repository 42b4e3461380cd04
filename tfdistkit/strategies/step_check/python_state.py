"""Finds numbers of Python that an eager step changes, where each replica of the process changes them once more.

With `run_eagerly=True` a step may count (`self.steps += 1`). Replicas in one process are threads with one model, so
they count twice as many steps as one process, and see other numbers than each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tfdistkit.errors import explain
from tfdistkit.keras_adapter import private_api

# A step may change them when it builds layers.
_STEPS = 2

_Numbers = dict[tuple[str, str], Any]


def watching(model: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Warns if one of the first steps changes a number of Python in the model or in one of its layers.

    Args:
        model: The model.
        function: Runs a step.

    Returns:
        A function that runs a step.
    """
    if not model.run_eagerly or len(model.distribute_strategy.extended.worker_devices) == 1:
        return function
    steps_left = _STEPS

    def watched(iterator: Any) -> Any:
        nonlocal steps_left
        if not steps_left:
            return function(iterator)
        before = _numbers_of(model)
        logs = function(iterator)
        after = _numbers_of(model)
        steps_left -= 1
        changed = [name for name, value in before.items() if after.get(name, value) != value]
        if changed:
            steps_left = 0
            _warn(model, changed[0], before[changed[0]], after[changed[0]])
        return logs

    return watched


def _numbers_of(model: Any) -> _Numbers:
    """Returns the numbers in public attributes of a model and its layers, by the names of layer and attribute."""
    found: _Numbers = {}
    for layer in private_api.layers_of(model):
        for name, value in vars(layer).items():
            if type(value) in (int, float) and not name.startswith("_"):
                found[layer.name, name] = value
    return found


def _warn(model: Any, changed: tuple[str, str], before: Any, after: Any) -> None:
    replicas = len(model.distribute_strategy.extended.worker_devices)
    warnings.warn(
        explain(
            f"A step should not change numbers of Python with `run_eagerly=True`: each of the {replicas} replicas of "
            "this process runs it with the same model.",
            received=f"`{changed[1]}` of {changed[0]!r}, which was {before} before a step and {after} after it",
            do="Count in a `keras.Variable`, or in a callback; or start each replica as a process: "
            f"`tfdistkit run -np {replicas} train.py` with tfdistkit.strategy('multiworker').",
        ),
        stacklevel=2,
    )
