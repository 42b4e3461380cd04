"""Models with a step, or a loss, of their own, independent of strategies."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

import tfdistkit
from parity.models import chain


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


class OwnSums(OwnMean):
    """Sums over rows, quotients of sums and roots of means in one loss, in its tracker and in logs."""

    def __init__(self, regularizer: Any = None) -> None:
        super().__init__(regularizer)
        # Without a call of `call`, so built by the first step alone.
        self.head = layers.Dense(2, activity_regularizer="l1")

    def loss_of(self, x: Any, y: Any) -> Any:
        hidden = self.hidden(x)
        return self.loss_from(y, self.out(hidden), self.head(hidden))

    def loss_from(self, y: Any, predicted: Any, head: Any) -> Any:
        """Returns the loss of predictions, and of another head."""
        each, kept = ops.square(y - predicted), ops.cast(y > 0, "float32")
        masked = ops.sum(each * kept) / (ops.sum(kept) + 1.0)
        middle = ops.mean(ops.square(head - 1.0)) * ops.exp(ops.mean(y))
        positive = tf.reduce_mean(tf.boolean_mask(each[:, 0], y[:, 0] > 0))
        return 0.01 * ops.sum(each) + masked + middle + ops.sqrt(positive) + sum(self.losses)

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.mean_loss.update_state(loss)
        return {"loss": loss, "mean_loss": self.mean_loss.result(), "root": ops.sqrt(ops.mean(ops.square(data[1])))}

    def test_step(self, data: Any) -> dict[str, Any]:
        loss = self.loss_of(*data)
        self.mean_loss.update_state(loss)
        return {"loss": loss, "mean_loss": self.mean_loss.result()}


class OwnSumsInFunctions(OwnSums):
    """The same in tf.functions of its own: the step, and the loss in it. Losses of layers cannot leave a function."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.Dense(2)

    train_step = tf.function(OwnSums.train_step)
    loss_from = tf.function(OwnSums.loss_from)


class OwnSumsInCall(OwnSums):
    """The same in Keras's step: in a loss of the model, and in losses that layers add."""

    train_step, test_step = keras.Model.train_step, keras.Model.test_step

    def call(self, inputs: Any) -> Any:
        hidden = self.hidden(inputs)
        head = self.head(hidden)
        self.add_loss(0.001 * ops.sum(ops.abs(head)))
        return ops.concatenate([self.out(hidden), head], axis=-1)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *unused: Any, **more: Any) -> Any:
        return self.loss_from(y, y_pred[:, :1], y_pred[:, 1:])


class OwnComparisons(OwnSums):
    """Rows compared with numbers of all rows: weights of classes by their counts, a variance, a logarithm of a sum."""

    def loss_from(self, y: Any, predicted: Any, head: Any) -> Any:
        """Returns the loss of predictions, and of another head."""
        each, classes = ops.square(y - predicted)[:, 0], ops.cast(y[:, 0] > 0, "int32")
        rarity = 1.0 / (1.0 + ops.cast(tf.math.bincount(classes, minlength=2), "float32"))
        centered = head - ops.mean(head, axis=0)
        spread = ops.mean(ops.var(head, axis=0)) + ops.dot(centered[:, 0], centered[:, 1]) / ops.sum(ops.abs(y))
        bound = ops.logsumexp(0.1 * predicted) - ops.log(ops.cast(ops.shape(y)[0], "float32"))
        return ops.mean(each * ops.take(rarity, classes)) + 0.1 * spread + 0.1 * bound


class OwnComparisonsInCall(OwnSumsInCall):
    """The same in Keras's step."""

    loss_from = OwnComparisons.loss_from


class OwnRecurrence(OwnMean):
    """Sums over the rows and times of outputs of recurrent layers, over their last states, and over mapped rows."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.last = layers.LSTM(4, return_sequences=True), layers.GRU(3, return_state=True)
        self.head = layers.Dense(2)

    def build(self, shape: Any) -> None:
        super().build(shape)
        for layer, size in (
            (self.hidden, shape[1:]),
            (self.out, (16,)),
            (self.steps, (shape[1], 1)),
            (self.head, (4,)),
        ):
            layer.build((None, *size))
        self.last.build((None, shape[1], 4))

    def loss_of(self, x: Any, y: Any) -> Any:
        series = self.steps(x[:, :, None])
        squares = tf.map_fn(lambda one: ops.sum(ops.square(one)), y - self.out(self.hidden(x)))
        means = self.head(series)
        penalty = ops.sum(ops.square(means) + ops.exp(means) - means) + ops.sum(ops.square(self.last(series)[1]))
        return 0.01 * penalty + ops.sum(squares) / 32.0


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


class OwnDescent(OwnMean):
    """Steps of gradient descent on the same rows, without an optimizer; or an optimizer's with their last gradient."""

    def __init__(self, times: int = 1, is_extragradient: bool = False):
        super().__init__()
        self.times, self.is_extragradient = times, is_extragradient

    def train_step(self, data: Any) -> dict[str, Any]:
        weights = self.trainable_variables
        before = [tf.identity(weight.value) for weight in weights]
        for _ in range(self.times):
            with tf.GradientTape() as tape:
                loss = self.loss_of(*data)
            gradients = tape.gradient(loss, weights)
            for weight, gradient in zip(weights, gradients):
                weight.assign_sub(0.05 * gradient)
        if self.is_extragradient:
            for weight, value in zip(weights, before):
                weight.assign(value)
            self.optimizer.apply(gradients, weights)
        return {"loss": loss}


class GatedGradients(OwnMean):
    """Changes its gradients by numbers of the batch, which must not be those of a replica, before it applies them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.out = layers.Dense(1, use_bias=False)  # Its gradients cancel each other: only rounding would remain.

    def train_step(self, data: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.how == "clip":
            gradients = [ops.clip(one, -0.2, 0.2) for one in tf.clip_by_global_norm(gradients, 0.9)[0]]
        elif self.how == "vector":
            gradients = self.as_one_vector(gradients)
        else:
            gradients = [self.changed(one, loss) for one in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def as_one_vector(self, gradients: list[Any]) -> list[Any]:
        """Projects all gradients together, as papers on several tasks do."""
        vector = ops.concatenate([ops.reshape(one, (-1,)) for one in gradients], 0)
        vector = vector - ops.minimum(ops.sum(vector[:5] * vector[-5:]), 0.1) * vector[::-1]
        parts = tf.split(vector / ops.norm(vector), [one.shape.num_elements() for one in gradients])
        return [ops.reshape(part, one.shape) for part, one in zip(parts, gradients)]

    def changed(self, gradient: Any, loss: Any) -> Any:
        if self.how == "branch":
            return ops.cond(loss > 2.5, lambda: gradient, lambda: 0.1 * gradient)
        if self.how == "switch":
            return ops.cast(loss > 2.5, "float32") * gradient
        if self.how == "choice":
            return ops.where(ops.logical_and(loss > 2.5, loss < 4.0), gradient, 0.1 * gradient)
        if self.how == "loss":
            return 0.3 * loss * gradient + 0.01
        return gradient / ops.sqrt(ops.sum(gradient**2))


class ChosenLoss(OwnMean):
    """Chooses a loss by a number of the batch, in branches, or takes one of Keras of standardized targets."""

    def __init__(self, is_standardized: bool) -> None:
        super().__init__()
        self.is_standardized = is_standardized

    def loss_of(self, x: Any, y: Any) -> Any:
        if self.is_standardized:
            y = (y - ops.mean(y)) / ops.std(y)
            return keras.losses.Huber()(y, self(x, training=True), sample_weight=ops.abs(y) / ops.max(ops.abs(y)))
        error = ops.mean(ops.square(y - self(x, training=True)))
        return ops.cond(
            error > 3.0, lambda: 2.0 * error, lambda: ops.cond(error > 2.0, lambda: error, lambda: error / 2)
        )


class OwnTargets(keras.Model):
    """A classifier whose step makes one-hot targets of the numbers of classes, by which `"accuracy"` is resolved."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(2, activation="softmax")

    def call(self, inputs: Any) -> Any:
        return self.out(inputs)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, classes = data
        y = ops.one_hot(ops.cast(classes[:, 0], "int32"), 2)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return self.compute_metrics(x, y, predicted)


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
