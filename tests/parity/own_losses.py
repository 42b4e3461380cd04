"""Losses that combine the rows of a batch, as people write them in `compile(loss=...)`, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops


def _dice(y: Any, predicted: Any) -> Any:
    """The Dice loss of the whole batch, a quotient of sums."""
    overlap = tf.reduce_sum(y * predicted)
    return 1.0 - (2.0 * overlap + 1.0) / (tf.reduce_sum(y) + tf.reduce_sum(predicted) + 1.0)


def _entropy_and_dice(y: Any, predicted: Any) -> Any:
    """A loss of each row, plus one number of the batch."""
    return keras.losses.binary_crossentropy(y, predicted) + _dice(y, predicted)


def _objects(y: Any, predicted: Any) -> Any:
    """Two losses of Keras, one of which combines rows."""
    return 0.5 * keras.losses.BinaryCrossentropy()(y, predicted) + keras.losses.Dice()(y, predicted)


def _valid_mean(y: Any, predicted: Any) -> Any:
    """A mean over the positive rows alone, as in TensorFlow's tutorial of transformers."""
    mask = ops.cast(y > 0, predicted.dtype)
    return ops.sum(ops.square(y - predicted) * mask) / ops.sum(mask)


def _pairs(y: Any, predicted: Any) -> Any:
    """Each row compared with all rows: the cross-entropy of its own among them."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(y)[0]), tf.matmul(ops.tanh(predicted), y, transpose_b=True)
    )


def _sum(y: Any, predicted: Any) -> Any:
    """A sum over rows, of losses of rows from a loss of Keras."""
    each = keras.losses.MeanSquaredError(reduction=None)(y, predicted)
    return 0.01 * tf.reduce_sum(each)


def _spread(y: Any, predicted: Any) -> Any:
    """A mean over rows, and a number for each column."""
    return ops.mean(ops.square(y - predicted)) + ops.relu(1.0 - ops.std(predicted, axis=0))


def _hardest(y: Any, predicted: Any) -> Any:
    """A mean over the half of the rows with the largest errors, and all pairs of rows by their order."""
    errors = ops.mean(ops.square(y - predicted), -1)
    hardest, _ = tf.math.top_k(errors, ops.maximum(ops.shape(errors)[0] // 2, 1))
    score, target = predicted[:, 0], y[:, 0]
    order = ops.softplus((score[:, None] - score) * ops.sign(target - target[:, None]))
    return ops.mean(hardest) + ops.mean(order)


class CenterLoss(keras.losses.Loss):
    """Distances to the center of a row's group, which the loss moves; with the distance of all rows to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = keras.Variable(ops.ones((2, 1)), trainable=False)
        self.rows = keras.Variable(0, dtype="int32", trainable=False)

    def call(self, y: Any, predicted: Any) -> Any:
        group = ops.cast(y[:, 0] > 0, "int32")
        away = ops.take(self.centers, group, axis=0) - predicted
        moved = tf.tensor_scatter_nd_sub(ops.convert_to_tensor(self.centers), group[:, None], 0.02 * away)
        self.centers.assign(ops.stop_gradient(moved))
        self.rows.assign_add(ops.shape(y)[0])
        pairs = ops.square(predicted - ops.transpose(predicted))
        seen = ops.cast(self.rows, predicted.dtype)
        return ops.mean(ops.square(away)) + ops.mean(pairs) / seen + ops.mean(ops.square(y - predicted))


def mixing(name: str) -> Any:
    """Returns a loss function by its name."""
    functions = (_dice, _entropy_and_dice, _objects, _valid_mean, _pairs, _sum, _spread, _hardest)
    return {f.__name__[1:]: f for f in functions}[name]
