"""The models of programs: Sequential, functional and subclassed, from the same layers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from fuzz import own_layers
from fuzz.feeding import CLASSES, TOKENS
from fuzz.programs import Program

UNITS = 4

# For inputs of each kind, the layers that map a row to a vector; in `SEQUENCES`, each token to a vector.
ENCODERS: dict[str, dict[str, Any]] = {
    "numbers": {"none": lambda: []},
    "images": {
        "conv": lambda: [layers.Conv2D(3, 2, activation="tanh"), layers.GlobalAveragePooling2D()],
        "conv_flat": lambda: [layers.Conv2D(2, 3, padding="same"), layers.MaxPooling2D(), layers.Flatten()],
        "depthwise": lambda: [layers.DepthwiseConv2D(2), layers.GlobalMaxPooling2D()],
        "transposed": lambda: [layers.Conv2DTranspose(2, 2), layers.Flatten()],
        "flatten": lambda: [layers.Flatten()],
    },
    "tokens": {
        "pool": lambda: [layers.Embedding(9, UNITS), layers.GlobalAveragePooling1D()],
        "masked_pool": lambda: [layers.Embedding(9, UNITS, mask_zero=True), layers.GlobalAveragePooling1D()],
        "lstm": lambda: [layers.Embedding(9, UNITS, mask_zero=True), layers.LSTM(3)],
        "gru": lambda: [layers.Embedding(9, UNITS), layers.GRU(3)],
        "bidirectional": lambda: [layers.Embedding(9, 3, mask_zero=True), layers.Bidirectional(layers.LSTM(2))],
        "conv1d": lambda: [layers.Embedding(9, UNITS), layers.Conv1D(3, 2), layers.GlobalMaxPooling1D()],
        "positions": lambda: [layers.Embedding(9, UNITS), own_layers.Positions(), layers.GlobalMaxPooling1D()],
    },
    "words": {"hash": lambda: [own_layers.HashBucket(), layers.Embedding(9, UNITS), layers.Flatten()]},
    "named": {"none": lambda: [layers.Concatenate()]},
    "nested": {"none": lambda: [layers.Concatenate()]},
}
ENCODERS["ragged"] = {
    name: (lambda make=make: [own_layers.Densify(), *make()]) for name, make in ENCODERS["tokens"].items()
}
SEQUENCES = {
    "each": lambda: [layers.Embedding(9, UNITS)],
    "masked": lambda: [layers.Embedding(9, UNITS, mask_zero=True)],
    "masked_lstm": lambda: [layers.Embedding(9, UNITS, mask_zero=True), layers.LSTM(3, return_sequences=True)],
}

BODY: dict[str, Any] = {
    "dense": lambda: layers.Dense(UNITS, activation="tanh"),
    "relu": lambda: layers.Dense(UNITS, activation="relu"),
    "l2": lambda: layers.Dense(UNITS, kernel_regularizer="l2", bias_regularizer="l1"),
    "activity": lambda: layers.Dense(UNITS, activity_regularizer="l2"),
    "constrained": lambda: layers.Dense(UNITS, kernel_constraint="max_norm"),
    "frozen": lambda: layers.Dense(UNITS, trainable=False),
    "layer_norm": lambda: layers.LayerNormalization(),
    "batch_norm": lambda: layers.BatchNormalization(momentum=0.8, synchronized=True),
    "spectral": lambda: layers.SpectralNormalization(layers.Dense(UNITS)),
    "activity_loss": own_layers.ActivityLoss,
    "rows_loss": own_layers.RowsLoss,
    "running_mean": own_layers.RunningMean,
    "call_counter": own_layers.CallCounter,
    "row_sums": own_layers.RowSums,
    "own_function": own_layers.OwnFunction,
    "function_with_state": own_layers.FunctionWithState,
    "branches": own_layers.Branches,
    "residual": own_layers.Residual,
}

_SHAPES = {"numbers": (4,), "images": (4, 4, 2), "tokens": (TOKENS,), "ragged": (None,), "words": (1,)}
_DTYPES = {"tokens": "int32", "ragged": "int32", "words": "string"}


def _heads(program: Program) -> dict[str, Any]:
    if program.targets == "two":
        return {"one": layers.Dense(1, name="one"), "two": layers.Dense(2, name="two")}
    if program.targets == "yes_no":
        return {"": layers.Dense(1, activation="sigmoid")}
    if program.targets == "class":
        return {"": layers.Dense(CLASSES, activation="softmax")}
    if program.targets == "none":
        return {"": keras.Sequential([layers.Dense(2), own_layers.LastLoss()])}
    return {"": layers.Dense(1)}


def stack_of(program: Program) -> list[Any]:
    """Makes all layers but the last."""
    encoders = SEQUENCES if program.targets == "tokens" else ENCODERS[program.inputs]
    return [*encoders[program.encoder](), *(BODY[name]() for name in program.body)]


# Layers that write their state in training only.
_BY_TRAINING = (own_layers.RunningMean, own_layers.CallCounter, own_layers.RowSums, own_layers.FunctionWithState)


class Stack(keras.Model):
    """The layers of a program in a subclassed model with `call`."""

    def __init__(self, program: Program):
        super().__init__()
        self.stack, self.heads = stack_of(program), _heads(program)
        self.heads_in_order = list(self.heads.values())

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        found = tf.nest.flatten(inputs) if isinstance(inputs, dict) else inputs
        for layer in self.stack:
            takes = isinstance(layer, _BY_TRAINING)
            found = layer(found, training=training) if takes else layer(found)
        outputs = {name: head(found) for name, head in self.heads.items()}
        return outputs if len(outputs) > 1 else outputs[""]


def _inputs_of(program: Program) -> Any:
    if program.inputs == "named":
        return {"a": keras.Input((2,), name="a"), "b": keras.Input((3,), name="b")}
    if program.inputs == "nested":
        return {"left": (keras.Input((2,)), keras.Input((1,))), "right": keras.Input((2,))}
    return keras.Input(_SHAPES[program.inputs], dtype=_DTYPES.get(program.inputs))


def make_network(program: Program, kind: type) -> keras.Model:
    """Makes the model of a program.

    Args:
        program: The program.
        kind: A class to mix in, with a step of its own; `object` for none.
    """
    if program.style == "subclassed":
        return type("OwnStack", (kind, Stack), {})(program) if kind is not object else Stack(program)
    if program.style == "sequential":
        base = keras.Sequential if kind is object else type("OwnSequential", (kind, keras.Sequential), {})
        stack = [*stack_of(program), *_heads(program).values()]
        return base([keras.Input(_SHAPES[program.inputs], dtype=_DTYPES.get(program.inputs)), *stack])
    inputs = _inputs_of(program)
    found = tf.nest.flatten(inputs) if isinstance(inputs, dict) else inputs
    for layer in stack_of(program):
        found = layer(found)
    outputs: Any = {name: head(found) for name, head in _heads(program).items()}
    base = keras.Model if kind is object else type("OwnModel", (kind, keras.Model), {})
    return base(inputs, outputs if len(outputs) > 1 else outputs[""])


def like(y: Any, predicted: Any) -> Any:
    """Returns targets in the shape and dtype of predictions."""
    return ops.reshape(ops.cast(y, predicted.dtype), ops.shape(predicted))


def mean_of_squares(y: Any, predicted: Any) -> Any:
    """A mean over everything."""
    return ops.mean(ops.square(like(y, predicted) - predicted))
