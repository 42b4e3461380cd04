"""The base of the compressions: which gradients travel compressed, and as which vector."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdistkit.communication.reducer import Reducer, Wire
from tfdistkit.validation import require_integer


class Compression(Reducer):
    """Compresses dense gradients of floating-point numbers; a subclass overrides `sum_compressed`.

    What remains is summed as it is: sparse gradients, which are small already, and small tensors.

    Args:
        min_size: Tensors of fewer numbers are not compressed.
    """

    needs_processes = True

    def __init__(self, min_size: int = 0):
        self.min_size = require_integer("min_size", min_size, at_least=0)

    def describe(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({options})"

    def choices(self, variables: list[Any]) -> list[str]:
        own = self.describe()
        return [own if self.takes(variable) else f"{own} (uncompressed)" for variable in variables]

    def takes(self, tensor: Any) -> bool:
        """Returns whether a gradient, or the gradient of a variable, is compressed."""
        if isinstance(tensor, tf.IndexedSlices):
            return False
        shape = tf.TensorShape(tensor.shape)
        is_known = shape.is_fully_defined() and shape.num_elements() >= max(self.min_size, 1)
        return bool(is_known and tf.as_dtype(tensor.dtype).is_floating)

    def reduce(self, gradients: list[Any], variables: list[Any], state: list[Any], wire: Wire) -> list[Any]:
        taken = [i for i, gradient in enumerate(gradients) if self.takes(gradient)]
        others = [i for i in range(len(gradients)) if i not in taken]
        results = dict(zip(others, wire.sum([gradients[i] for i in others])))
        if taken:
            sums = self.sum_compressed([gradients[i] for i in taken], [state[i] for i in taken], wire)
            results.update(zip(taken, sums))
        return [results[i] for i in range(len(gradients))]

    def sum_compressed(self, gradients: list[tf.Tensor], state: list[Any], wire: Wire) -> list[tf.Tensor]:
        """Returns the sums of dense tensors over the replicas, the same bits on all of them.

        Args:
            gradients: This replica's parts, of static shapes.
            state: What `build` returned for the variable of each.
            wire: The collectives.
        """
        raise NotImplementedError


def flatten(tensors: list[Any]) -> tf.Tensor:
    """Returns the numbers of tensors, a float32 vector."""
    return tf.concat([tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in tensors], 0)


def unflatten(flat: tf.Tensor, like: list[Any]) -> list[tf.Tensor]:
    """Returns tensors of the shapes and dtypes of others, from the vector that `flatten` makes of those."""
    parts = tf.split(flat, [tensor.shape.num_elements() for tensor in like])
    return [tf.cast(tf.reshape(part, tensor.shape), tensor.dtype) for part, tensor in zip(parts, like)]
