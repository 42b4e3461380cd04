"""Custom training loops with `strategy.run`, in TensorFlow's convention: the user divides by the batch size."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from fuzz import feeding, networks, objectives

SUM = tf.distribute.ReduceOp.SUM


def _loop(session: Any, loss_of: Any, calls: int = 1) -> None:
    """The custom loop of https://www.tensorflow.org/tutorials/distribute/custom_training, with a metric."""
    program, strategy = session.program, session.strategy
    keras.utils.set_random_seed(program.seed)
    with strategy.scope():
        model, optimizer = networks.make_network(program, object), objectives.make_optimizer(program)
        metric = keras.metrics.MeanAbsoluteError(name="mae")
    data = strategy.experimental_distribute_dataset(feeding.dataset(program, feeding.columns(program)))

    def train_step(inputs: Any) -> Any:
        x, y = inputs[0], inputs[1]
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = loss_of(y, predicted)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        metric.update_state(y, predicted)
        return loss

    def distributed_train_step(inputs: Any) -> Any:
        return strategy.reduce(SUM, strategy.run(train_step, args=(inputs,)), axis=None)

    step = distributed_train_step if program.eager else tf.function(distributed_train_step)
    losses, maes = [], []
    for _ in range(program.epochs):
        losses += [float(step(inputs)) for inputs in data]
        maes.append(float(metric.result()))
        metric.reset_state()
    session.keep_logs("history", {"loss": losses, "mae": maes})
    session.keep_weights("weights", model.weights)
    session.keep_weights("optimizer_state", optimizer.variables)


def _average_loss(session: Any) -> None:
    """The loss of the tutorial: one for each row, divided by the global batch size."""
    per_row = keras.losses.MeanSquaredError(reduction=None)

    def loss_of(y: Any, predicted: Any) -> Any:
        return tf.nn.compute_average_loss(per_row(y, predicted), global_batch_size=session.program.batch)

    _loop(session, loss_of)


def _keras_loss(session: Any) -> None:
    """An unscaled Keras loss; the replicas' losses are summed."""
    _loop(session, keras.losses.MeanAbsoluteError())


def _own_division(session: Any) -> None:
    """A sum over the rows, divided by the global batch size by hand."""

    def loss_of(y: Any, predicted: Any) -> Any:
        return tf.reduce_sum(tf.square(tf.reshape(y, tf.shape(predicted)) - predicted)) / float(session.program.batch)

    _loop(session, loss_of)


LOOPS = {"loop_average": _average_loss, "loop_keras": _keras_loss, "loop_own": _own_division}
