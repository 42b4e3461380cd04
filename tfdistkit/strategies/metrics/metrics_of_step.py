"""Builds the metrics of `compile` from what a model's own `train_step` passes to them, ahead of the first step.

`"accuracy"` becomes `SparseCategoricalAccuracy` or `CategoricalAccuracy` by the shape of the targets, and a step may
convert those of the batch (`y = ops.one_hot(y, 10)`). In one process Keras builds metrics while it traces the step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdistkit.keras_adapter import private_api

# Names that Keras resolves by the shapes of targets and predictions.
_BY_SHAPES = frozenset(("accuracy", "acc", "crossentropy", "ce"))

_LOCAL = threading.local()


def is_building() -> bool:
    """Returns whether a step is traced only for what it passes to metrics: then it has no gradients."""
    return getattr(_LOCAL, "is_building", False)


def build(model: Any, batch: Any) -> None:
    """Builds the metrics of a model that has a `train_step` of its own; may leave them unbuilt.

    Args:
        model: A model. Its layers are built on the way, in the order of the step.
        batch: Something with the shapes and dtypes of a replica's batch.
    """
    unbuilt = [one for one in model.metrics if not getattr(one, "built", True)]
    if type(model).train_step is keras.Model.train_step or not unbuilt or not _has_ambiguous_name(model):
        return

    def step(data: Any) -> None:
        model.train_step(data)

    with contextlib.suppress(Exception), keras.StatelessScope(), _building():
        tf.function(step, autograph=False).get_concrete_function(private_api.type_specs(batch))


def _has_ambiguous_name(model: Any) -> bool:
    try:
        config = model.get_compile_config()
    except Exception:  # Something in it cannot be serialized.
        return True
    names = keras.tree.flatten([config.get("metrics"), config.get("weighted_metrics")])
    return any(name in _BY_SHAPES for name in names if isinstance(name, str))


@contextlib.contextmanager
def _building() -> Iterator[None]:
    _LOCAL.is_building = True
    try:
        yield
    finally:
        _LOCAL.is_building = False
