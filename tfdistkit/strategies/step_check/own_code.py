"""Tells which models train by code of the user's own, or by layers that combine rows: only their steps are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfdistkit.keras_adapter import private_api

# Layers of Keras that run code of the user's, or whose output depends on other rows of the batch: on the longest of a
# replica, or on the loudest.
_LAYERS = (keras.layers.Lambda, keras.layers.TextVectorization, keras.layers.MelSpectrogram)
# Functions that layers of Keras call.
_FUNCTIONS = ("activation", "recurrent_activation", "activity_regularizer")
# Operations of functional models that compute each number from those at the same place.
_ELEMENTWISE = frozenset(
    (
        *("Add", "Subtract", "Multiply", "Divide", "TrueDivide", "Power", "Maximum", "Minimum", "Negative", "Abs"),
        *("Absolute", "Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Square", "Sin", "Cos", "Tanh", "Sigmoid"),
        *("Relu", "Relu6", "LeakyRelu", "Elu", "Selu", "Gelu", "Silu", "Softplus", "Softsign", "Clip", "Cast", "Sign"),
        *("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "LogicalNot"),
    )
)


def trains_by_own_code(model: Any) -> bool:
    """Returns whether the train step, a loss or a layer of a model is not one of Keras's, or may combine rows.

    Args:
        model: The model, compiled.
    """
    methods = ("train_step", "compute_loss")
    if any(getattr(type(model), name) is not getattr(keras.Model, name) or name in vars(model) for name in methods):
        return True
    losses = keras.tree.flatten(private_api.compile_arguments(model).get("loss"))
    if any(callable(loss) and not private_api.is_of_keras(loss) for loss in losses):
        return True
    return any(map(_may_combine_rows, private_api.layers_of(model)))


def _may_combine_rows(layer: Any) -> bool:
    """Returns whether a layer, which may be a model, may compute outputs of a row from other rows."""
    if isinstance(layer, _LAYERS) or not private_api.is_of_keras(layer):
        return True
    if isinstance(layer, (keras.layers.Softmax, keras.layers.UnitNormalization)) and 0 in np.ravel(layer.axis):
        return True
    functions = (getattr(layer, name, None) for name in _FUNCTIONS)
    if any(one is not None and not private_api.is_of_keras(one) for one in functions):
        return True
    return any(type(one).__name__ not in _ELEMENTWISE for one in _operations(layer))


def _operations(layer: Any) -> Iterator[Any]:
    """Yields the operations of a functional model that are no layers: `keras.ops` of its tensors."""
    functional = getattr(layer, "operations", ())
    return (one for one in functional if not isinstance(one, keras.Layer))
