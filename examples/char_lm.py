"""Trains a character model on Python's own reference texts (`pydoc_data.topics`, about 465,000 characters).

    python examples/char_lm.py
    tfdistkit run -np 2 examples/char_lm.py --epochs=2

Shows how each worker reads its own part of a tf.data pipeline: shard first, then batch.
"""

import json
import math
import time
from pydoc_data import topics

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdistkit

FLAGS = flags.FLAGS
flags.DEFINE_string("strategy", "auto", "Strategy: auto, one_device, mirrored, multiworker, horovod.")
flags.DEFINE_integer("epochs", 1, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Global batch size: sequences a step, over all workers.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of weights and shuffle order, the same on every worker.")
flags.DEFINE_integer("sequences", 2048, "Number of sequences of the text to use; 0 for all.", lower_bound=0)
flags.DEFINE_string("checkpoint", None, "File to save the model in after each epoch, such as char_lm.keras.")
flags.DEFINE_string("history_file", None, "JSON file for losses and throughput.")

LENGTH = 64


def load():
    """Returns the text as sequences of character ids, shuffled by the seed, and the number of characters."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    characters, numbers = np.unique(list(text), return_inverse=True)
    numbers = numbers[: len(numbers) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1).astype("int32")
    order = np.random.default_rng(FLAGS.seed).permutation(len(numbers))
    return numbers[order][: FLAGS.sequences or None], len(characters)


def dataset(sequences):
    """Returns batches of this worker's part of the sequences; `batch_size` is the global one."""
    part = tfdistkit.data.shard(tf.data.Dataset.from_tensor_slices((sequences[:, :-1], sequences[:, 1:])))
    return part.batch(FLAGS.batch_size).prefetch(tf.data.AUTOTUNE)


def build_model(characters):
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((LENGTH,), dtype="int32"), layers.Embedding(characters, 32)]
        + [layers.GRU(96, return_sequences=True), layers.Dense(characters)]
    )


def main(_):
    tf.get_logger().setLevel("WARNING")  # absl shows INFO, where TensorFlow logs each collective
    strategy = tfdistkit.strategy(FLAGS.strategy)
    keras.utils.set_random_seed(FLAGS.seed)
    sequences, characters = load()
    test = len(sequences) // 10
    with strategy.scope():
        model = build_model(characters)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss)
    callbacks = [tfdistkit.callbacks.ChiefCheckpoint(FLAGS.checkpoint)] if FLAGS.checkpoint else []
    start = time.perf_counter()
    history = model.fit(dataset(sequences[test:]), epochs=FLAGS.epochs, callbacks=callbacks, shuffle=False)
    rate = (len(sequences) - test) * FLAGS.epochs / (time.perf_counter() - start)
    test_loss = model.evaluate(dataset(sequences[:test]), verbose=0)
    if tfdistkit.is_chief():
        print(f"test: {test_loss / math.log(2):.3f} bits per character, {rate:.0f} sequences per second")
        if FLAGS.history_file:
            with open(FLAGS.history_file, "w") as file:
                json.dump({**history.history, "test_loss": test_loss, "examples_per_second": rate}, file)


if __name__ == "__main__":
    app.run(main)
