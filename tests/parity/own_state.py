"""Layers with state of their own, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

import tfdistkit


class SumOfRows(layers.Layer):
    """Keeps a moving sum over the rows of a batch, as the codebook of a VQ-VAE."""

    def build(self, shape: Any) -> None:
        self.sums = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="sums")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.sums.assign(0.9 * self.sums + 0.1 * tfdistkit.collectives.all_reduce(ops.sum(inputs, 0)))
        return inputs


class Codebook(layers.Layer):
    """Assigns each row to a code, whose vector is the moving mean of its rows (VQ-VAE), and counts rows in integers."""

    def build(self, shape: Any) -> None:
        made = dict(trainable=False, initializer=keras.initializers.RandomUniform(seed=3))
        self.codes = self.add_weight(shape=(4, shape[-1]), name="codes", **made)
        self.sums = self.add_weight(shape=(4, shape[-1]), name="sums", **made)
        self.sizes = self.add_weight(shape=(4,), initializer="ones", trainable=False, name="sizes")
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32", name="rows")
        self.used = self.add_weight(shape=(4,), initializer="zeros", trainable=False, dtype="int64", name="used")

    def call(self, inputs: Any, training: bool = False) -> Any:
        distances = ops.sum(ops.square(inputs[:, None] - self.codes), axis=-1)
        code = ops.one_hot(ops.argmin(distances, axis=-1), 4)
        outputs = inputs + 0.1 * ops.stop_gradient(ops.matmul(code, self.codes) - inputs)
        if training:
            self.rows.assign_add(ops.shape(inputs)[0])
            self.used.assign_add(ops.sum(ops.cast(code, "int64"), axis=0))
            self.sizes.assign(0.9 * self.sizes + 0.1 * ops.sum(code, axis=0))
            added = ops.matmul(ops.transpose(code), ops.stop_gradient(inputs))
            self.sums.assign_add((added - self.sums) * 0.1)
            self.codes.assign(self.sums / (self.sizes[:, None] + 1e-3))
        return outputs
