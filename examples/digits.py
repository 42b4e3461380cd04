"""Trains a small convolutional network on scikit-learn's 1,797 handwritten digits.

    python examples/digits.py
    tfdistkit run -np 2 examples/digits.py

The batch size is the global one: each of two workers computes half of each batch, with the results of one worker.
"""

import json
import time

import keras
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdistkit

FLAGS = flags.FLAGS
flags.DEFINE_string("strategy", "auto", "Strategy: auto, one_device, mirrored, multiworker, horovod.")
flags.DEFINE_integer("epochs", 10, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Global batch size: rows a step, over all workers.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of weights and shuffle order, the same on every worker.")
flags.DEFINE_string("checkpoint", None, "File to save the model in after each epoch, such as digits.keras.")
flags.DEFINE_string("history_file", None, "JSON file for losses, accuracy and throughput.")


class EpochTimes(keras.callbacks.Callback):
    # Skips the first epoch, in which TensorFlow traces the model.
    def on_train_begin(self, logs=None):
        self.ends = [time.perf_counter()]

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(time.perf_counter())

    def examples_per_second(self, examples):
        ends = self.ends[1:] if len(self.ends) > 2 else self.ends
        return examples * (len(ends) - 1) / (ends[-1] - ends[0])


def load():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(images, labels.astype("int32"), test_size=0.2, random_state=0, stratify=labels)


def build_model():
    # Smooth layers only: at the kinks of relu and max pooling, rounding would show in the loss curve.
    layers = keras.layers
    images = keras.Input((8, 8, 1))
    features = layers.Conv2D(32, 3, padding="same", activation="gelu")(images)
    features = layers.Conv2D(64, 3, strides=2, padding="same", activation="gelu")(features)
    return keras.Model(images, layers.Dense(10)(layers.Flatten()(features)))


def main(_):
    tf.get_logger().setLevel("WARNING")  # absl shows INFO, where TensorFlow logs each collective
    strategy = tfdistkit.strategy(FLAGS.strategy)
    keras.utils.set_random_seed(FLAGS.seed)
    x_train, x_test, y_train, y_test = load()
    with strategy.scope():
        model = build_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
    times = EpochTimes()
    saving = [tfdistkit.callbacks.ChiefCheckpoint(FLAGS.checkpoint)] if FLAGS.checkpoint else []
    history = model.fit(x_train, y_train, FLAGS.batch_size, FLAGS.epochs, callbacks=[times, *saving])
    _, accuracy = model.evaluate(x_test, y_test, batch_size=FLAGS.batch_size, verbose=0)
    rate = times.examples_per_second(len(x_train))
    if tfdistkit.is_chief():
        print(f"test accuracy {accuracy:.4f}, {rate:.0f} examples per second")
        if FLAGS.history_file:
            with open(FLAGS.history_file, "w") as file:
                json.dump({**history.history, "test_accuracy": accuracy, "examples_per_second": rate}, file)


if __name__ == "__main__":
    app.run(main)
