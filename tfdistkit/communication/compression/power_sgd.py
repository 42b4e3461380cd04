"""`PowerSGD`: matrices as products of narrow ones."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdistkit.communication.compression.compression import flatten, unflatten
from tfdistkit.communication.compression.stateful import Feedback
from tfdistkit.communication.reducer import MakeState, Wire
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_bool, require_integer, require_positive


class PowerSGD(Feedback):
    """Sends a gradient of m x n numbers as two matrices, m x rank and n x rank, with error feedback.

    One step of the power method (https://arxiv.org/abs/1905.13727): the second matrix of a step is where the next one
    begins. A kernel of more than two dimensions is a matrix of its last dimension by all others.

    Args:
        rank: The columns of the two matrices.
        start_after: How many steps are exact first.
        min_compression_rate: A tensor is compressed if that saves this factor; others are summed as they are.
        warm_start: Whether a step begins with the matrix of the last one; if not, with random numbers.

    Raises:
        OptionError: (a ValueError) if an argument is out of range.
    """

    # All ranks decompose the same bits: they need the same kind of processor to get the same, as the updates do.
    def __init__(self, rank: int = 4, start_after: int = 0, min_compression_rate: float = 2.0, warm_start: bool = True):
        super().__init__()
        self.rank = require_integer("rank", rank)
        self.start_after = require_integer("start_after", start_after, at_least=0)
        self.min_compression_rate = require_positive("min_compression_rate", min_compression_rate)
        if min_compression_rate < 1:
            raise OptionError(
                explain(
                    "`min_compression_rate` must be at least 1.",
                    received=f"min_compression_rate={min_compression_rate!r}",
                )
            )
        self.warm_start = require_bool("warm_start", warm_start)

    def takes(self, tensor: Any) -> bool:
        if not super().takes(tensor) or len(tensor.shape) < 2:
            return False
        rows, columns = _matrix(tensor)
        return (rows + columns) * self.rank * self.min_compression_rate < rows * columns

    def build_state(self, variable: Any, number: int, make_state: MakeState) -> dict[str, Any]:
        begin = keras.initializers.RandomNormal(stddev=1.0, seed=number)
        shape = (_matrix(variable)[1], self.rank)
        options = {"dtype": "float32", "initializer": begin, "saved": False}
        factor = make_state(variable, "compression_factor", shape=shape, **options)
        return {"factor": factor, **super().build_state(variable, number, make_state)}

    def sum_compressed(self, gradients: list[tf.Tensor], state: list[Any], wire: Wire) -> list[tf.Tensor]:
        if not self.start_after:
            return super().sum_compressed(gradients, state, wire)
        compress, step = super().sum_compressed, tf.convert_to_tensor(state[0]["step"])

        def exact() -> tuple[tf.Tensor, ...]:
            state[0]["step"].assign(step + 1)
            return tuple(wire.sum(gradients))

        return list(tf.cond(step < self.start_after, exact, lambda: tuple(compress(gradients, state, wire))))

    def sum_with_rests(
        self, gradients: list[tf.Tensor], state: list[Any], step: tf.Tensor, wire: Wire
    ) -> tuple[list[tf.Tensor], list[tuple[Any, tf.Tensor]]]:
        rests, factors = [one["rest"] for one in state], [one["factor"] for one in state]
        matrices = [
            tf.reshape(tf.cast(g, tf.float32) + tf.convert_to_tensor(rest), _matrix(g))
            for g, rest in zip(gradients, rests)
        ]
        right = [tf.convert_to_tensor(f) if self.warm_start else _random(f, step, i) for i, f in enumerate(factors)]
        # The factor of the last step has the size of its gradient; squared, that of this one would leave float16.
        right = [tf.math.l2_normalize(q, 0, epsilon=_TINY) for q in right]
        left = _sum(wire, [tf.matmul(m, q) for m, q in zip(matrices, right)])
        left = [tf.linalg.qr(p)[0] for p in left]
        right = _sum(wire, [tf.matmul(m, p, transpose_a=True) for m, p in zip(matrices, left)])

        sums, changes = [], []
        for gradient, matrix, p, q, rest, factor in zip(gradients, matrices, left, right, rests, factors):
            total = tf.matmul(p, q, transpose_b=True)
            sums.append(tf.cast(tf.reshape(total, gradient.shape), gradient.dtype))
            changes += [(rest, matrix - total / wire.replicas), (factor, q)]
        return sums, changes


# Below the squared norm of any column but one of zeros.
_TINY = 1e-37


def _matrix(tensor: Any) -> tuple[int, int]:
    """Returns the rows and columns of a tensor as a matrix."""
    shape = tf.TensorShape(tensor.shape)
    return shape.num_elements() // shape[-1], shape[-1]


def _random(like: Any, step: tf.Tensor, number: int) -> tf.Tensor:
    return tf.random.stateless_normal(like.shape, [step, tf.cast(number, step.dtype)])


def _sum(wire: Wire, matrices: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums matrices in one collective."""
    return unflatten(wire.sum([flatten(matrices)])[0], matrices)
