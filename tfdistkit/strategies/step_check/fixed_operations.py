"""Makes a trial step compute the same for the same rows, whatever other rows are in the batch.

Random numbers of a batch differ from those of its parts, and BatchNormalization normalises with the rows of a replica
by definition. On trial, random numbers are constants, BatchNormalization uses its moving statistics, and nothing is
written to variables.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from tfdistkit.collectives.shm.transport import GRAPH_NAME
from tfdistkit.keras_adapter import private_lookup
from tfdistkit.strategies.sync.gradients.trial import CannotTryError

# In place of uniform numbers in [0, 1): Dropout keeps all entries. In place of normal ones.
_UNIFORM, _NORMAL = 0.9, 0.7
_FILLED = {
    **dict.fromkeys(("RandomUniform", "StatelessRandomUniform", "StatelessRandomUniformV2"), _UNIFORM),
    **dict.fromkeys(("RandomStandardNormal", "StatelessRandomNormal", "StatelessRandomNormalV2"), _NORMAL),
    **dict.fromkeys(("TruncatedNormal", "StatelessTruncatedNormal", "StatelessTruncatedNormalV2"), _NORMAL),
}
# The place of their least number, which all numbers are where the end is a constant.
_INTEGERS = {"RandomUniformInt": 1, "StatelessRandomUniformInt": 2, "StatelessRandomUniformIntV2": 4}
_SHUFFLES = ("RandomShuffle", "StatelessShuffle")
_REPLACED = (*_FILLED, *_INTEGERS, *_SHUFFLES)
# Operations whose inputs have equally many rows, or one.
_OF_EQUAL_ROWS = frozenset(
    (
        *("Add", "AddV2", "Sub", "Mul", "Div", "RealDiv", "DivNoNan", "SquaredDifference", "Maximum", "Minimum", "Pow"),
        *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "SelectV2"),
        *("SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits", "BatchMatMulV2"),
    )
)
# Operations that are read through, and those whose results have a length of their own: that of classes, say.
_OF_ONE = frozenset(
    (
        *("Cast", "Identity", "IdentityN", "StopGradient", "Neg", "Sqrt", "Square", "Log", "Exp", "Abs", "Reciprocal"),
        *("Reshape", "SplitV"),
    )
)
_NOT_ROWS = (
    *("Bincount", "DenseBincount", "UnsortedSegment", "Unique", "HistogramFixedWidth", "ScatterNd"),
    *("Collective", "Horovod", "EagerPyFunc", "PyFunc", "QueueDequeue"),
)
# Writes to variables and tables, which have no result.
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "LookupTableInsert", "LookupTableRemove", "LookupTableImport")
# Other operations with these words in their names draw random numbers; these ones alone only derive keys from seeds.
_RANDOM, _KEYS = ("Random", "Multinomial", "CandidateSampler", "Rng"), "StatelessRandomGet"


@contextlib.contextmanager
def fixed(graph: Any) -> Iterator[None]:
    """Replaces random operations and writes in a graph, and in the functions in it, while its body traces them.

    Args:
        graph: The graph that the body traces.
    """
    owner, name, original = private_lookup.resolve("create_op")

    def create_op(self: Any, op_type: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if op_type.startswith(_WRITES) and _is_inside(self, graph):
            with self.as_default():
                return tf.no_op()
        operation = original(self, op_type, inputs, *args, **kwargs)
        return _Fixed(operation) if op_type in _REPLACED and _is_inside(self, graph) else operation

    normalize = keras.layers.BatchNormalization.call

    def call(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return normalize(layer, inputs, training=training if layer.synchronized else False, mask=mask)

    with mock.patch.object(owner, name, create_op), mock.patch.object(keras.layers.BatchNormalization, "call", call):
        yield


def require_fixed(graph: Any) -> None:
    """Checks that a graph draws no random numbers but those that `fixed` replaced, and calls no Python of the user's.

    Args:
        graph: The graph.

    Raises:
        CannotTryError: if it draws random numbers or calls Python code.
    """
    for operation in graph.get_operations():
        is_random = any(word in operation.type for word in _RANDOM) and not operation.type.startswith(_KEYS)
        if is_random and operation.type not in _REPLACED:
            raise CannotTryError(f"it draws random numbers ({operation.type})")
        if "PyFunc" in operation.type and GRAPH_NAME not in operation.name:
            raise CannotTryError("it calls Python (`tf.py_function`, `tf.numpy_function`)")


def require_any_rows(graph: Any) -> None:
    """Checks that a graph has no fixed number of rows, which a trial of fewer rows would not fit.

    Args:
        graph: The graph, in which the number of rows is unknown.

    Raises:
        CannotTryError: if the rows meet a tensor of a fixed length, or are given one.
    """
    for operation in graph.get_operations():
        shapes = [one.shape for one in operation.inputs if one.shape.rank and not _has_own_length(one)]
        results = [one.shape for one in operation.outputs if one.shape.rank]
        if operation.type in ("Reshape", "EnsureShape"):
            is_fixed = bool(shapes and results) and shapes[0][0] is None and (results[0][0] or 0) > 1
            # Rows may be in another dimension of the result: `reshape(x, (nodes, -1, units))`.
            is_fixed = is_fixed and results[0].is_fully_defined() and not _is_of_broadcast(operation.inputs[0])
        else:
            firsts = [shape[0] for shape in shapes if results and shape.rank == results[0].rank]
            is_fixed = operation.type in _OF_EQUAL_ROWS and None in firsts and any((one or 0) > 1 for one in firsts)
        if is_fixed:
            raise CannotTryError(f"it has a fixed number of rows ({operation.type} of {[*map(str, shapes)]})")


def _has_own_length(tensor: tf.Tensor) -> bool:
    """Returns whether the first dimension of a tensor is of unknown size, and surely none of rows."""
    operation = tensor.op
    while True:
        if operation.type.startswith(_NOT_ROWS):
            return True
        if operation.type not in _OF_ONE and operation.type not in _OF_EQUAL_ROWS:
            return False
        operation = next((one.op for one in operation.inputs if one.shape.rank == tensor.shape.rank), None)
        if operation is None:
            return False


def _is_of_broadcast(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is a sum over what was broadcast: a gradient, which has the shape of what was small."""
    return tensor.op.type == "Sum" and tensor.op.inputs[1].op.type == "BroadcastGradientArgs"


def _is_inside(inner: Any, graph: Any) -> bool:
    while inner is not None and inner is not graph:
        inner = getattr(inner, "outer_graph", None)
    return inner is graph


class _Fixed:
    """A random operation for TensorFlow's own code, which reads its attributes, but with another result.

    Args:
        operation: The operation, whose own result is unused.
    """

    def __init__(self, operation: Any):
        self._operation = operation
        with operation.graph.as_default():
            self.outputs = [_fixed(operation)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)


def _fixed(operation: Any) -> tf.Tensor:
    inputs, [output] = operation.inputs, operation.outputs
    if operation.type in _FILLED:
        return tf.fill(inputs[0], tf.constant(_FILLED[operation.type], output.dtype))
    if operation.type in _INTEGERS:
        least, end = inputs[_INTEGERS[operation.type] :][:2]
        places = inputs[0].shape[0]
        if end.op.type == "Const" or not places:
            return tf.fill(inputs[0], least)
        # Numbers below a number of rows choose rows: each its own, not all of them the first one of the replica.
        numbers = least + tf.cast(tf.range(inputs[0][0]), output.dtype) % tf.maximum(end - least, 1)
        return tf.broadcast_to(tf.reshape(numbers, [-1, *[1] * (places - 1)]), inputs[0])
    return tf.identity(inputs[0])
