"""Tells which models train by code of the user's own: only their steps are checked."""

from __future__ import annotations

from typing import Any

import keras

from tfdistkit.keras_adapter import private_api

# Layers of Keras that run code of the user's, or whose output depends on the longest row of a replica.
_LAYERS = (keras.layers.Lambda, keras.layers.TextVectorization)


def trains_by_own_code(model: Any) -> bool:
    """Returns whether the train step, a loss or a layer of a model is not one of Keras's.

    Args:
        model: The model, compiled.
    """
    methods = ("train_step", "compute_loss")
    if any(getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model) for name in methods):
        return True
    losses = keras.tree.flatten(private_api.compile_arguments(model).get("loss"))
    if any(callable(loss) and not private_api.is_of_keras(loss) for loss in losses):
        return True
    return any(isinstance(one, _LAYERS) or not private_api.is_of_keras(one) for one in private_api.layers_of(model))
