"""Keeps the losses that layers add, and the tensors in their attributes, apart where replicas run eagerly.

Keras holds the losses of `add_loss` and of activity regularizers on the layer, which all replicas share. Eager replicas
take turns: one waits inside the compiled loss while the next calls the model, which clears and replaces them. So it is
with tensors that `call` leaves in an attribute (`self.z_mean = ...`) for the loss. In a graph replicas do not wait
while they are traced.

The hooks take Keras's own function (`original`) first, and pass straight through to it outside of eager replicas.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

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


def keep_attributes(context: Any) -> None:
    """Makes a replica find the tensors in attributes of layers as it left them before it waited for the others.

    Args:
        context: The replica context of this thread.
    """
    merge_call = context.merge_call

    def merge_and_restore(*args: Any, **kwargs: Any) -> Any:
        restore = _tensors_in_attributes()
        merged = merge_call(*args, **kwargs)
        for one in restore:
            one()
        return merged

    context.merge_call = merge_and_restore


def _tensors_in_attributes() -> list[Callable[[], Any]]:
    """Returns functions that restore the attributes with tensors of all layers of the model."""
    step = steps.current()
    layers = [] if step is None or step.model is None else private_api.layers_of(step.model)
    restore: list[Callable[[], Any]] = []
    for layer in layers:
        for name, value in vars(layer).items():
            if isinstance(value, (list, dict)) and _holds_tensors(value):
                restore.append(functools.partial(_restore_contents, value, copy.copy(value)))
            if _holds_tensors(value):
                # Layers track what is set as an attribute; this was there before.
                restore.append(functools.partial(vars(layer).__setitem__, name, value))
    return restore


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(one, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) for one in values)  # No variables.


def _restore_contents(container: Any, contents: Any) -> None:
    # The methods of the plain types: a layer that is built refuses new entries of its lists.
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, contents)
    else:
        list.__setitem__(container, slice(None), list(contents))


def _eager_step() -> steps.ReplicaStep | None:
    step = steps.current()
    return step if step is not None and step.is_eager and not private_api.is_stateless() else None
