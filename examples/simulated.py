"""Learns the rates of a predator-prey model from simulations in Python, which take most of the time.

    python examples/simulated.py
    tfdistkit run -np 2 examples/simulated.py

Python code of one process runs on one core, whatever the number of threads. Two workers share the simulations on two.
"""

import json
import random
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdistkit

FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 3, "Number of epochs.", lower_bound=1)
flags.DEFINE_integer("simulations", 3072, "Simulations an epoch, over all workers.", lower_bound=1)
flags.DEFINE_integer("batch_size", 512, "Global batch size: simulations a step, over all workers.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of weights and simulations, the same on every worker.")
flags.DEFINE_string("history_file", None, "JSON file for losses and times.")

STEPS, SHOWN_STEPS, STEP = 4000, 64, 0.005


class EpochTimes(keras.callbacks.Callback):
    # Skips the first epoch, in which TensorFlow traces the model.
    def on_train_begin(self, logs=None):
        self.ends = [time.perf_counter()]

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(time.perf_counter())

    def seconds(self):
        seconds = np.diff(self.ends)
        return float(np.median(seconds[1:] if len(seconds) > 1 else seconds))


def simulate(number):
    """Returns the numbers of prey and predators over time, and the four rates of the simulation."""
    chance = random.Random(f"{FLAGS.seed} {number}")
    births, eaten, deaths, fed = rates = [chance.uniform(0.5, 1.5) for _ in range(4)]
    prey, predators, curve = 1.0, 0.5, []
    for step in range(STEPS):
        encounters = prey * predators
        prey += STEP * (births * prey - eaten * encounters)
        predators += STEP * (fed * encounters - deaths * predators)
        if step % (STEPS // SHOWN_STEPS) == 0:
            curve += prey, predators
    return np.array(curve[: 2 * SHOWN_STEPS], "float32"), np.array(rates, "float32")


def dataset():
    """Returns batches of this worker's part of endless simulations; `batch_size` is the global one."""

    def load(number):
        curve, rates = tf.numpy_function(simulate, [number], (tf.float32, tf.float32))
        return tf.ensure_shape(curve, (2 * SHOWN_STEPS,)), tf.ensure_shape(rates, (4,))

    part = tfdistkit.data.shard(tf.data.Dataset.counter())
    # `num_parallel_calls` would not help: Python's threads share one core (the GIL).
    return part.map(load).batch(FLAGS.batch_size).prefetch(2)


def main(_):
    tf.get_logger().setLevel("WARNING")  # absl shows INFO, where TensorFlow logs each collective
    strategy = tfdistkit.strategy("auto")
    keras.utils.set_random_seed(FLAGS.seed)
    with strategy.scope():
        layers = [keras.layers.Dense(64, "gelu"), keras.layers.Dense(64, "gelu"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((2 * SHOWN_STEPS,)), *layers])
        model.compile(keras.optimizers.Adam(2e-3), "mse")
    times = EpochTimes()
    steps = max(1, FLAGS.simulations // FLAGS.batch_size)
    history = model.fit(dataset(), epochs=FLAGS.epochs, steps_per_epoch=steps, callbacks=[times])
    if tfdistkit.is_chief():
        print(f"{times.seconds():.1f} seconds per epoch")
        if FLAGS.history_file:
            with open(FLAGS.history_file, "w") as file:
                json.dump({**history.history, "seconds_per_epoch": times.seconds()}, file)


if __name__ == "__main__":
    app.run(main)
