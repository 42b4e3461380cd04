"""Keeps the losses that layers add apart where replicas of one process run eagerly.

Keras holds the losses of `add_loss` and of activity regularizers on the layer, which all replicas share. Eager replicas
take turns: one waits inside the compiled loss while the next calls the model, which clears and replaces them. In a
graph replicas do not wait while they are traced.

Each function takes Keras's own (`original`) first, and passes straight through to it outside of eager replicas.
"""

from __future__ import annotations

from typing import Any

import keras

from tfdistkit.keras_adapter import private_api
from tfdistkit.strategies.sync import step as steps


def add_loss(original: Any, layer: Any, loss: Any) -> None:
    """Adds a loss to the layer, and to those of this replica."""
    original(layer, loss)
    step = _eager_step()
    if step is not None:
        step.losses.setdefault(id(layer), (layer, []))[1].extend(keras.tree.flatten(loss))


def own_losses(original: Any, layer: Any) -> list[Any]:
    """Returns the losses that this replica added to the layer."""
    step = _eager_step()
    if step is None or id(layer) not in step.losses:
        return original(layer)
    return list(step.losses[id(layer)][1])


def clear_losses(original: Any, layer: Any) -> None:
    """Clears the losses of the layer, which calls this for those inside of it, and those of this replica."""
    original(layer)
    step = _eager_step()
    if step is not None:
        step.losses[id(layer)] = (layer, [])


def _eager_step() -> steps.ReplicaStep | None:
    step = steps.current()
    return step if step is not None and step.is_eager and not private_api.is_stateless() else None
