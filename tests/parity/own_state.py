"""Layers with state of their own, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
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


class RunningStatistics(layers.Layer):
    """Normalizes by the mean and the variance of all rows so far (Welford), and keeps other functions of sums."""

    def build(self, shape: Any) -> None:
        made = dict(trainable=False, initializer="zeros")
        self.seen = self.add_weight(shape=(), name="seen", **made)
        self.mean = self.add_weight(shape=shape[-1:], name="mean", **made)
        self.squares = self.add_weight(shape=shape[-1:], name="squares", **made)
        self.total = self.add_weight(shape=(), name="total", **made)
        self.positive = self.add_weight(shape=(), name="positive", **made)
        self.spread = self.add_weight(shape=shape[-1:], name="spread", **made)
        self.chosen = self.add_weight(shape=(), name="chosen", **made)
        self.most = self.add_weight(shape=(), dtype="int32", name="most", **made)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            rows = ops.cast(ops.shape(inputs)[0], "float32")
            mean, kept = ops.mean(inputs, axis=0), ops.cast(inputs > 0, "float32")
            moved = mean - self.mean
            seen = self.seen + rows
            self.squares.assign_add(ops.sum(ops.square(inputs), axis=0) - rows * ops.square(mean))
            self.squares.assign_add(ops.square(moved) * self.seen * rows / seen)
            self.mean.assign_add(moved * rows / seen)
            self.seen.assign(seen)
            self.total.assign_add(ops.sum(inputs))
            self.positive.assign(0.9 * self.positive + 0.1 * ops.sum(inputs * kept) / (ops.sum(kept) + 1e-6))
            self.spread.assign(0.5 * self.spread + ops.sqrt(ops.abs(ops.mean(inputs**2, axis=0) - mean**2) + 1e-3))
            self.chosen.assign(ops.where(ops.sum(inputs) > 0, self.chosen + ops.sum(kept), self.chosen))
            self.most.assign(ops.maximum(self.most, ops.cast(ops.sum(kept), "int32")))
        return (inputs - self.mean) / ops.sqrt(self.squares / (self.seen + 1.0) + 1.0)


class MovingMean(layers.Layer):
    """Moves a mean towards that of its rows."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=shape[-1:], name="mean", trainable=False, initializer="zeros")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
        return inputs


class Centers(layers.Layer):
    """Moves the center of each class towards its rows, as center loss does, and keeps the largest numbers of each."""

    def build(self, shape: Any) -> None:
        made = dict(trainable=False, initializer="zeros")
        self.centers = self.add_weight(shape=(3, shape[-1]), name="centers", **made)
        self.largest = self.add_weight(shape=(3, shape[-1]), name="largest", **made)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            classes = ops.argmax(inputs[:, :3], axis=-1)
            before = tf.convert_to_tensor(self.centers)
            moved = 0.1 * (tf.gather(before, classes) - inputs)
            self.centers.assign(tf.tensor_scatter_nd_sub(before, classes[:, None], moved))
            before = tf.convert_to_tensor(self.largest)
            self.largest.assign(tf.tensor_scatter_nd_max(before, classes[:, None], inputs))
        return inputs - 0.01 * ops.sum(ops.tanh(self.centers))
