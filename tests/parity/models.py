"""The models, losses and layers of the case table, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

import tfdistkit
from parity.data import WORDS

# Computes the local BatchNormalization of N replicas in one process (`batch_normalization`).
replicas_to_emulate = 1


def chain(shape: tuple[int, ...], *stack: Any, dtype: str | None = None) -> keras.Model:
    """A Sequential model of these layers."""
    return keras.Sequential([keras.Input(shape, dtype=dtype), *stack])


def mlp(*extra: Any, **dense: Any) -> keras.Model:
    """A hidden layer, the given layers, and one output."""
    return chain((10,), layers.Dense(16, activation="tanh", **dense), *extra, layers.Dense(1))


def classifier(*extra: Any) -> keras.Model:
    """As `mlp`, for binary targets."""
    return chain((10,), layers.Dense(16, activation="relu"), *extra, layers.Dense(1, activation="sigmoid"))


def embedding() -> keras.Model:
    """A model with a sparse gradient (IndexedSlices)."""
    stack = layers.Embedding(50, 8), layers.GlobalAveragePooling1D(), layers.Dense(1, activation="sigmoid")
    return chain((7,), *stack, dtype="int32")


def lstm() -> keras.Model:
    """A recurrent model with one output for each sequence."""
    stack = layers.Embedding(50, 8), layers.LSTM(8), layers.Dense(1, activation="sigmoid")
    return chain((7,), *stack, dtype="int32")


def masked_lstm() -> keras.Model:
    """A recurrent model with one output for each token, padding masked."""
    stack = layers.Embedding(50, 8, mask_zero=True), layers.LSTM(8, return_sequences=True), layers.Dense(1)
    return chain((7,), *stack, dtype="int32")


def integers() -> keras.Model:
    """Integers in, integer classes out."""
    return chain((7,), layers.Embedding(50, 8), layers.Flatten(), layers.Dense(4, activation="softmax"), dtype="int64")


def embedded() -> keras.Model:
    """A vector of length 1 for each row, to compare with those of other rows."""
    stack = layers.Flatten(), layers.Dense(4), layers.UnitNormalization()
    return chain((7,), layers.Embedding(50, 8), *stack, dtype="int64")


def convolution() -> keras.Model:
    """A small image model."""
    stack = layers.Conv2D(8, 3, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(1)
    return chain((8, 8, 3), *stack)


def everything() -> keras.Model:
    """Embedding, BatchNormalization and Dropout together."""
    stack = layers.Flatten(), layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.2)
    return chain((7,), layers.Embedding(50, 8), *stack, layers.Dense(1, activation="sigmoid"), dtype="int32")


def two_outputs() -> keras.Model:
    """A functional model with two named inputs and outputs."""
    a, b = keras.Input((4,), name="a"), keras.Input((6,), name="b")
    hidden = layers.Dense(16, activation="tanh")(layers.Concatenate()([a, b]))
    # Keras 3.10 knows outputs by the names of their layers.
    one, two = layers.Dense(1, name="one")(hidden), layers.Dense(2, name="two")(hidden)
    return keras.Model({"a": a, "b": b}, {"one": one, "two": two})


class NestedInputs(keras.Model):
    """A subclassed model that takes a dictionary with a dictionary and a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh")
        self.out = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        left, right = inputs["left"], inputs["right"]
        return self.out(self.hidden(ops.concatenate([left["a"], left["b"], *right], -1)))


class HashBucket(layers.Layer):
    """Turns words into integers inside the model."""

    def call(self, inputs: Any) -> Any:
        return tf.strings.to_hash_bucket_fast(inputs, 20)

    def compute_output_spec(self, inputs: Any) -> Any:
        return keras.KerasTensor(inputs.shape, "int64")


def words_and_counts() -> keras.Model:
    """A string column and an integer column."""
    word, count = keras.Input((1,), name="word", dtype="string"), keras.Input((1,), name="count", dtype="int64")
    hidden = [layers.Flatten()(layers.Embedding(20, 4)(HashBucket()(word)))]
    hidden.append(layers.Flatten()(layers.Embedding(5, 4)(count)))
    return keras.Model({"word": word, "count": count}, layers.Dense(1)(layers.Concatenate()(hidden)))


def sentences() -> keras.Model:
    """Text in, through TextVectorization."""
    vectorize = layers.TextVectorization(vocabulary=list(WORDS), output_sequence_length=4)
    stack = layers.Embedding(12, 4), layers.Flatten(), layers.Dense(1)
    return chain((1,), vectorize, *stack, dtype="string")


class ActivityLoss(layers.Layer):
    """Adds a loss: a mean over the rows of the batch."""

    def call(self, inputs: Any) -> Any:
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs


class FaultyGradient(layers.Layer):
    """Returns its inputs; the gradient of the few rows that start with a large number is NaN."""

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def faulty(x: Any) -> Any:
            return tf.identity(x), lambda upstream: tf.where(x[:, :1] > 0.985, float("nan"), upstream)

        return faulty(inputs)


class SplitNormalization(layers.BatchNormalization):
    """Local BatchNormalization of two replicas, in one process: each half of a batch by its own statistics.

    The moving statistics move towards the mean of the halves' statistics, weighted by their rows.
    """

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training:
            return super().call(inputs, training=training)
        rows = tf.shape(inputs)[0]
        first = (rows + 1) // 2
        outputs, statistics = [], []
        for half in (inputs[:first], inputs[first:]):
            count = tf.cast(tf.shape(half)[0], half.dtype)
            mean = tf.reduce_sum(half, 0) / tf.maximum(count, 1.0)
            variance = tf.reduce_sum(tf.square(half - mean), 0) / tf.maximum(count, 1.0)
            scale = tf.math.rsqrt(variance + self.epsilon) * self.gamma
            outputs.append((half - mean) * scale + self.beta)
            share = count / tf.cast(rows, half.dtype)
            statistics.append(tf.stack([mean, variance]) * share)
        mean, variance = tf.unstack(tf.add_n(statistics))
        self.moving_mean.assign(self.moving_mean * self.momentum + mean * (1.0 - self.momentum))
        self.moving_variance.assign(self.moving_variance * self.momentum + variance * (1.0 - self.momentum))
        return tf.concat(outputs, 0)


def batch_normalization(**options: Any) -> Any:
    """Local BatchNormalization; in the reference process, that of two replicas."""
    kind = SplitNormalization if replicas_to_emulate == 2 else layers.BatchNormalization
    return kind(**options)


def scalar_loss() -> Any:
    """A loss function that averages the batch itself."""

    def mean_of_squares(y: Any, predicted: Any) -> Any:
        return ops.mean(ops.square(y - predicted))

    return mean_of_squares


class OwnTrainStep(keras.Model):
    """The custom training step of the Keras guide, which also logs the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh")
        self.out = layers.Dense(1)
        self.mean_loss = keras.metrics.Mean(name="mean_loss")

    def call(self, inputs: Any) -> Any:
        return self.out(self.hidden(inputs))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.mean_loss.update_state(loss)
        return {"loss": loss, "mean_loss": self.mean_loss.result()}


def masked_loss() -> Any:
    """A loss function whose number of values depends on the content of the rows."""

    def errors_of_positive(y: Any, predicted: Any) -> Any:
        return tf.boolean_mask(ops.square(y - predicted)[:, 0], y[:, 0] > 0)

    return errors_of_positive


class OwnMean(OwnTrainStep):
    """A step whose loss is plain arithmetic, with the regularizers of its layers and a weight of each row."""

    def __init__(self, regularizer: Any = None) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="tanh", kernel_regularizer=regularizer)

    def loss_of(self, x: Any, y: Any) -> Any:
        return ops.mean(ops.square(y - self(x, training=True))) + sum(self.losses)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


class GradientPenalty(OwnMean):
    """A loss with a gradient with respect to the inputs, as in WGAN-GP."""

    def loss_of(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            predicted = self(x)
        slopes = ops.sqrt(ops.sum(ops.square(tape.gradient(predicted, x)), axis=1) + 1e-6)
        return ops.mean(ops.square(y - predicted)) + ops.mean((slopes - 1.0) ** 2)


class AverageLoss(OwnMean):
    """A distributed loss in TensorFlow's convention, in a Keras step."""

    def __init__(self, global_batch: int | None = None) -> None:
        super().__init__("l2")
        self.global_batch = global_batch

    def loss_of(self, x: Any, y: Any) -> Any:
        each = keras.losses.mean_squared_error(y, self(x, training=True))
        average = tf.nn.compute_average_loss(each, global_batch_size=self.global_batch)
        return average + tf.nn.scale_regularization_loss(sum(self.losses))


class OwnComputeLoss(OwnMean):
    """Keras's step with another loss."""

    train_step = keras.Model.train_step

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *unused: Any, **more: Any) -> Any:
        return ops.mean(ops.abs(y - y_pred)) + sum(self.losses)


class OwnAccumulation(OwnMean):
    """Sums the gradients of two batches in its own variables."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.hidden.build(shape)
        self.out.build((None, 16))
        self.seen = self.add_weight(shape=(), dtype="int32", trainable=False, name="seen")
        self.sums = [
            self.add_weight(shape=v.shape, trainable=False, initializer="zeros", name=f"sum_{i}")
            for i, v in enumerate(self.trainable_variables)
        ]

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables)):
            total.assign_add(gradient)
        self.seen.assign_add(1)
        is_second = ops.cast(self.seen % 2 == 0, "float32")
        self.optimizer.apply([is_second * total / 2.0 for total in self.sums], self.trainable_variables)
        for total in self.sums:
            total.assign(total * (1.0 - is_second))
        return {"loss": loss}


class SharpnessAware(OwnMean):
    """Ascends along the gradient of the global batch, takes the gradient there (SAM), and clips it."""

    def train_step(self, data: Any) -> dict[str, Any]:
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        first = tfdistkit.global_gradients(tape.gradient(loss, weights))
        steps = [0.02 * g / (tf.linalg.global_norm(first) + 1e-6) for g in first]
        for weight, step in zip(weights, steps):
            weight.assign_add(step)
        with tf.GradientTape() as tape:
            there = self.loss_of(*data)
        second = tfdistkit.global_gradients(tape.gradient(there, weights))
        for weight, step in zip(weights, steps):
            weight.assign_sub(step)
        self.optimizer.apply(tf.clip_by_global_norm(second, 0.5)[0], weights)
        return {"loss": loss}


class ClippingSGD(keras.optimizers.SGD):
    """Clips gradients in an overridden `apply`."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads, _ = tf.clip_by_global_norm(list(grads), 0.05)
        super().apply(grads, trainable_variables)


class ClippingGradients(keras.optimizers.SGD):
    """Clips each gradient in an overridden `apply_gradients`, by the size of its variable (AGC)."""

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        kept = []
        for gradient, variable in grads_and_vars:
            limit = 0.02 * tf.maximum(tf.norm(tf.convert_to_tensor(variable)), 1e-2)
            kept.append((gradient * tf.minimum(1.0, limit / tf.norm(gradient)), variable))
        return super().apply_gradients(kept)


class TwoTowers(OwnTrainStep):
    """A step that passes `call` the inputs and the targets of a batch, as siamese networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = chain((10,), layers.Dense(4)), chain((1,), layers.Dense(4))

    def call(self, inputs: Any) -> Any:
        left, right = inputs
        return ops.sum(self.left(left) * self.right(right), -1)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.relu(1.0 - self(data)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Gan(keras.Model):
    """Two models, two optimizers, no `call()`. Its noise comes with the data, so that it can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = chain((6,), layers.Dense(8, activation="tanh"), layers.Dense(1))
        self.generator = chain((4,), layers.Dense(8, activation="tanh"), layers.Dense(6))
        self.d_loss, self.g_loss = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, optimizer: Any, loss: Any, **unused: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = optimizer, type(optimizer).from_config(optimizer.get_config())
        self.compare = loss

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def train_step(self, data: Any) -> dict[str, Any]:
        noise, real = data[0][:, :4], data[0][:, 4:]
        both = tf.concat([self.generator(noise), real], 0)
        labels = tf.concat([tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(real)[0], 1))], 0)
        with tf.GradientTape() as tape:
            d_loss = self.compare(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            faked = self.discriminator(self.generator(noise))
            g_loss = self.compare(tf.zeros((tf.shape(real)[0], 1)), faked)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}
