"""Reads the graph of a step: what depends on the batch or its content, and what an operation does with its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import tensorflow as tf

# Operations whose output size depends on the content of the inputs.
_SIZED_BY_DATA = frozenset(
    (
        "Where",
        "Unique",
        "UniqueV2",
        "UniqueWithCounts",
        "UniqueWithCountsV2",
        "DynamicPartition",
        "RaggedRange",
        "RaggedGather",
        "StringSplit",
        "StringSplitV2",
        "NonMaxSuppressionV3",
        "NonMaxSuppressionV4",
        "NonMaxSuppressionV5",
        "SparseFillEmptyRows",
        "Bincount",
        "DenseBincount",
        "SetSize",
    )
)


def is_sized_by_data(operation: Any) -> bool:
    """Returns whether the size of an operation's output depends on the content of its inputs."""
    return operation.type in _SIZED_BY_DATA


def depends_on_data(tensor: Any) -> bool:
    """Returns whether the number of rows of a tensor may depend on more than the number of rows of the batch.

    Args:
        tensor: A tensor with at least one dimension.

    Returns:
        False if the first dimension is static, or no operation behind the tensor has a size that depends on content.
        True in eager execution, where the operations behind a tensor are unknown.
    """
    if tf.executing_eagerly():
        return True
    if tensor.shape.rank is not None and tensor.shape[0] is not None:
        return False
    visited, waiting = set(), [tensor.op]
    while waiting:
        operation = waiting.pop()
        if operation.name in visited:
            continue
        visited.add(operation.name)
        if operation.type in _SIZED_BY_DATA:
            return True
        waiting.extend(one.op for one in operation.inputs)
    return False


class Ancestry:
    """Tells for the tensors of a graph whether they were computed from a certain kind of tensor; looks at each once.

    Args:
        is_wanted: Returns whether a tensor is of that kind.
        ends: Names of tensors that count as computed from nothing.
        is_end: Returns whether another tensor does.
    """

    def __init__(
        self,
        is_wanted: Callable[[tf.Tensor], bool],
        ends: Collection[str] = (),
        is_end: Callable[[tf.Tensor], bool] = lambda tensor: False,
    ):
        self._is_wanted, self._ends, self._is_end = is_wanted, ends, is_end
        self._known: dict[str, bool] = {}

    def includes(self, tensor: tf.Tensor) -> bool:
        """Returns whether a tensor is of the wanted kind, or was computed from one that is."""
        waiting = [tensor]
        while waiting:
            one = waiting[-1]
            inputs = list(one.op.inputs)
            missing = next((before for before in inputs if before.name not in self._known), None)
            if one.name in self._known:
                waiting.pop()
            elif one.dtype == tf.resource or one.name in self._ends or self._is_end(one):
                self._known[one.name] = False
            elif self._is_wanted(one) or any(self._known.get(before.name) for before in inputs):
                self._known[one.name] = True
            elif missing is None:
                self._known[one.name] = False
            else:
                waiting.append(missing)
        return self._known[tensor.name]


def comes_from_batch(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor was computed from the rows of a step, or their number, and not from variables alone.

    Args:
        tensor: A tensor. In eager execution, where the operations behind it are unknown, the result is True.
    """
    return tf.executing_eagerly() or Ancestry(is_from_dataset).includes(tensor)


def is_from_dataset(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is one of the batch itself."""
    if tensor.op.type == "PlaceholderWithDefault":  # Whose number of rows is hidden (`placeholder_rows`).
        return True
    if tensor.op.type not in ("Placeholder", "IteratorGetNext", "OptionalGetValue"):
        return False
    captures = getattr(tensor.graph, "captures", [])
    return not any(tensor is inner for outer, inner in captures if hasattr(outer, "numpy"))


def is_collective(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is the result of a collective, so that values computed from it are not local sums."""
    return any(word in tensor.op.type for word in ("Collective", "Horovod", "PyFunc"))


def is_unknown(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is random, or computed by Python, and may so differ between replicas."""
    return "Random" in tensor.op.type or "PyFunc" in tensor.op.type


def is_scalar_cast(tensor: tf.Tensor) -> bool:
    """Returns whether a number such as that of the rows becomes a float."""
    source = tensor.op.inputs[0] if tensor.op.type == "Cast" else None
    return source is not None and tensor.dtype.is_floating and source.dtype.is_integer and source.shape.rank == 0


def is_zero(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is known to be zeros."""
    value = tf.get_static_value(tensor)
    return value is not None and not np.any(value)


def keeps_numbers(before: tf.DType, after: tf.DType) -> bool:
    """Returns whether a cast is linear. A truncation is not, and a cast of booleans has no sum behind it."""
    return after.is_floating if before.is_floating else before.is_integer


def is_along(operation: Any, axis: int) -> bool:
    """Returns whether a reduction is along an axis."""
    axes, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape.rank
    return axes is None or not rank or axis in np.ravel(axes) % rank


def count_of_mean(mean: tf.Tensor) -> tf.Tensor:
    """Returns how many numbers a mean is of."""
    entries = tf.size(mean.op.inputs[0], tf.int64)
    return tf.cast(entries, tf.float64) / max(mean.shape.num_elements(), 1)


def place_after_tensordot(reshape: Any, axis: int) -> int | None:
    """Returns where a dimension is in the matrix that `tf.tensordot` makes of a tensor; None for another reshaping."""
    sizes, after = reshape.inputs[1].op, reshape.outputs[0].shape
    if sizes.type != "Pack" or after.rank != 2 or not all(one.op.type == "Prod" for one in sizes.inputs):
        return None
    gather = sizes.inputs[0].op.inputs[0].op  # The sizes of the dimensions that become the first one.
    first = gather.inputs[1].shape.num_elements() if gather.type == "GatherV2" else None
    return None if first is None else int(axis >= first)


def axis_after(reduction: Any, axis: int) -> int:
    """Returns the position of a dimension after a reduction along others."""
    if "keep_dims" in reduction.node_def.attr and reduction.get_attr("keep_dims"):
        return axis
    rank = reduction.inputs[0].shape.rank
    return axis - sum(one % rank < axis for one in np.ravel(tf.get_static_value(reduction.inputs[1])))


def joined_by(operation: Any) -> list[tf.Tensor]:
    """Returns the tensors that an operation stacks or concatenates, without the axis."""
    inputs = list(operation.inputs)
    return inputs if operation.type == "Pack" else inputs[:-1]


def is_first(operation: Any) -> bool:
    """Returns whether a slice takes the first entry alone."""
    begin = tf.get_static_value(operation.inputs[1])
    return bool(operation.get_attr("shrink_axis_mask")) and begin is not None and begin[0] == 0


def place_of_size(tensor: tf.Tensor) -> int | None:
    """Returns the dimension whose size a tensor is (`tf.shape(x)[-1]`); None if it is not the size of one dimension."""
    operation = tensor.op
    if tensor.shape.rank != 0 or operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return None
    begin, rank = _static(operation.inputs[1]), operation.inputs[0].op.inputs[0].shape.rank
    return None if begin is None or not rank or not operation.get_attr("shrink_axis_mask") else int(begin[0]) % rank


def is_later_size(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is sizes of a shape without the first (`tf.shape(x)[1:]`)."""
    return is_later_part(tensor) and tensor.op.inputs[0].op.type == "Shape"


def is_later_part(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is entries of a vector without the first."""
    operation = tensor.op
    if operation.type != "StridedSlice" or operation.get_attr("begin_mask"):
        return False
    begin, size = _static(operation.inputs[1]), operation.inputs[0].shape[:1]
    return begin is not None and size.rank == 1 and bool(size[0]) and begin[0] % size[0] != 0


def _static(tensor: tf.Tensor) -> Any:
    """Returns a value that is known while tracing, also a sum or a difference (`tf.rank(x) - 1`); else None."""
    known, operation = tf.get_static_value(tensor), tensor.op
    if known is not None or operation.type not in ("Pack", "AddV2", "Sub"):
        return known
    inputs = [_static(one) for one in operation.inputs]
    if any(one is None for one in inputs):
        return None
    return np.stack(inputs) if operation.type == "Pack" else inputs[0] + inputs[1] * (-1) ** (operation.type == "Sub")
