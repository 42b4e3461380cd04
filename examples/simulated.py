"""Learns how predators and prey live on each other, from simulations in Python: making the data is most of the work.

    python examples/simulated.py
    tfdistkit run -np 2 examples/simulated.py

Python runs on one core of a process, however many threads ask it to. Two workers have two, and share the simulations.
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
flags.DEFINE_integer("epochs", 3, "How many epochs.", lower_bound=1)
flags.DEFINE_integer("simulations", 3072, "Simulations of an epoch, over all workers.", lower_bound=1)
flags.DEFINE_integer("batch_size", 512, "Simulations of a step, over all workers.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of weights and simulations. The same on every worker.")
flags.DEFINE_string("history_file", None, "Where to write what was measured, as JSON.")

STEPS, SHOWN_STEPS, STEP = 4000, 64, 0.005


class EpochTimes(keras.callbacks.Callback):
    # The first epoch does not count: TensorFlow traces the model in it.
    def on_train_begin(self, logs=None):
        self.ends = [time.perf_counter()]

    def on_epoch_end(self, epoch, logs=None):
        self.ends.append(time.perf_counter())

    def seconds(self):
        seconds = np.diff(self.ends)
        return float(np.median(seconds[1:] if len(seconds) > 1 else seconds))


def simulate(number):
    """Returns how many prey and predators there are over time, and the four rates that made it so."""
    chance = random.Random(f"{FLAGS.seed} {number}")
    births, eaten, deaths, fed = rates = [chance.uniform(0.5, 1.5) for _ in range(4)]
    prey, predators, seen = 1.0, 0.5, []
    for step in range(STEPS):
        rendezvous = prey * predators
        prey += STEP * (births * prey - eaten * rendezvous)
        predators += STEP * (fed * rendezvous - deaths * predators)
        if step % (STEPS // SHOWN_STEPS) == 0:
            seen += prey, predators
    return np.array(seen[: 2 * SHOWN_STEPS], "float32"), np.array(rates, "float32")


def dataset():
    """This worker's part of the simulations, without end; `batch_size` stays the global one."""

    def load(number):
        seen, rates = tf.numpy_function(simulate, [number], (tf.float32, tf.float32))
        return tf.ensure_shape(seen, (2 * SHOWN_STEPS,)), tf.ensure_shape(rates, (4,))

    part = tfdistkit.data.shard(tf.data.Dataset.counter())
    # `num_parallel_calls` would not make it faster: Python's threads take turns.
    return part.map(load).batch(FLAGS.batch_size).prefetch(2)


def main(_):
    tf.get_logger().setLevel("WARNING")  # absl shows INFO, and TensorFlow tells of each collective there
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
