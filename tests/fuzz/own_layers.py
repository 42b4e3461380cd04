"""Custom layers with losses, state and functions, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

import tfdistkit
from fuzz.feeding import TOKENS


class ActivityLoss(layers.Layer):
    """Adds a loss: a mean over the rows of the batch."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


class RowsLoss(layers.Layer):
    """Adds a loss without rows: a penalty on its own weight."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.sum(ops.square(self.factor)))
        return inputs * self.factor


class Positions(layers.Layer):
    """Adds a vector for each position, looked up once for all rows, as transformers do."""

    def build(self, shape: Any) -> None:
        self.table = layers.Embedding(TOKENS, shape[-1])
        self.table.build()

    def call(self, inputs: Any) -> Any:
        return inputs + self.table(ops.arange(ops.shape(inputs)[1]))


class RunningMean(layers.Layer):
    """Stores the mean of its inputs, which it adds to its outputs in inference."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            mean = ops.mean(inputs, axis=tuple(range(len(inputs.shape) - 1)))
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            return inputs
        return inputs - self.mean


class CallCounter(layers.Layer):
    """Counts its calls in training, in an integer; every tenth counts for the outputs."""

    def build(self, shape: Any) -> None:
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign_add(1)
        return inputs * (1.0 + 0.1 * ops.cast(self.calls, inputs.dtype))


class RowSums(layers.Layer):
    """Counts its rows in an integer, and keeps a moving sum over them, both for the outputs of later steps."""

    def build(self, shape: Any) -> None:
        self.rows = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="rows")
        self.sums = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="sums")

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs * (1.0 + 0.01 * ops.cast(self.rows % 7, inputs.dtype)) + 0.1 * ops.tanh(self.sums)
        if training:
            # Not `ops.shape(inputs)[0]`: a static 1 cannot be told from a counter.
            rows = ops.sum(ops.cast(ops.isfinite(inputs[..., 0]), "int32"))
            total = ops.sum(inputs, axis=tuple(range(len(inputs.shape) - 1)))
            if tf.executing_eagerly():  # There nothing tells that they are sums.
                rows, total = (tfdistkit.collectives.all_reduce(tf.convert_to_tensor(one)) for one in (rows, total))
            self.rows.assign_add(rows)
            self.sums.assign(0.5 * self.sums + 0.1 * total)
        return outputs


class OwnFunction(layers.Layer):
    """Computes in its own `tf.function`."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    @tf.function
    def _inner(self, inputs: Any) -> Any:
        return ops.tanh(inputs * self.factor)

    def call(self, inputs: Any) -> Any:
        return self._inner(inputs)


class FunctionWithState(layers.Layer):
    """Writes its state in its own `tf.function`."""

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    @tf.function
    def _move(self, mean: Any) -> None:
        self.mean.assign(0.8 * self.mean + 0.2 * mean)

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = inputs + 0.1 * self.mean  # Before the update: afterwards it would depend on the replica's rows.
        if training:
            self._move(ops.mean(inputs, axis=tuple(range(len(inputs.shape) - 1))))
        return outputs


class Branches(layers.Layer):
    """Routes each row by its data, in a `tf.cond` by the number of rows."""

    def build(self, shape: Any) -> None:
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")

    def call(self, inputs: Any) -> Any:
        return tf.cond(tf.shape(inputs)[0] > 0, lambda: inputs * self.factor, lambda: inputs)


class Residual(layers.Layer):
    """A layer that contains a layer."""

    def build(self, shape: Any) -> None:
        self.dense = layers.Dense(shape[-1], activation="tanh")
        self.dense.build(shape)

    def call(self, inputs: Any) -> Any:
        return inputs + self.dense(inputs)


class HashBucket(layers.Layer):
    """Turns words into integers inside the model."""

    def call(self, inputs: Any) -> Any:
        return tf.strings.to_hash_bucket_fast(inputs, 9)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, "int64")


class Densify(layers.Layer):
    """Pads ragged sequences."""

    def call(self, inputs: Any) -> Any:
        return inputs.to_tensor(shape=[None, 5]) if isinstance(inputs, tf.RaggedTensor) else inputs


class LastLoss(layers.Layer):
    """The whole loss of a model without targets: a mean over the rows."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(ops.mean(ops.square(inputs - 0.5)))
        return inputs
