"""The models, losses and layers of the case table, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

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


@keras.saving.register_keras_serializable("parity")
class Lookups(layers.Layer):
    """Looks up tokens, positions, relative positions (an index several times), and averages of sets of tokens."""

    def build(self, shape: Any) -> None:
        self.tokens, self.positions, self.sets = (layers.Embedding(50, 8) for _ in range(3))
        for table in (self.tokens, self.positions, self.sets):
            table.build()
        self.distances = self.add_weight(shape=(shape[1], 8), name="distances")

    def call(self, tokens: Any) -> Any:
        n = tokens.shape[1]
        distance = tf.abs(tf.range(n)[:, None] - tf.range(n)[None])
        pairs = ops.mean(tf.gather(self.distances, tf.reshape(distance, [-1])), axis=0)
        sets = tf.nn.embedding_lookup_sparse(
            self.sets.embeddings.value, tf.sparse.from_dense(tokens), None, combiner="mean"
        )
        return self.tokens(tokens) + self.positions(ops.arange(ops.shape(tokens)[1])) + pairs + sets[:, None]


def lookups() -> keras.Model:
    """A model whose sparse gradients have other indices than those of tokens."""
    return chain((7,), Lookups(), layers.GlobalMaxPooling1D(), layers.Dense(1, activation="sigmoid"), dtype="int32")


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


def masked_loss() -> Any:
    """A loss function whose number of values depends on the content of the rows."""

    def errors_of_positive(y: Any, predicted: Any) -> Any:
        return tf.boolean_mask(ops.square(y - predicted)[:, 0], y[:, 0] > 0)

    return errors_of_positive


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
