"""Trains a recommender with a table of a million users on synthetic ratings with a known best accuracy.

    python examples/recommender.py
    tfdistkit run --ps 1 -np 2 examples/recommender.py --strategy=parameter_server

Each user belongs to a group and each item to a genre. A group likes a genre or not, and one rating in ten is flipped.
So the best possible accuracy on new ratings is 0.9.
"""

import json
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdistkit

FLAGS = flags.FLAGS
flags.DEFINE_string("strategy", "auto", "Strategy: auto, one_device, multiworker, parameter_server, ...")
flags.DEFINE_integer("users", 1_000_000, "Rows of the table of users; 1,000 of them have ratings.", lower_bound=1_000)
flags.DEFINE_integer("epochs", 6, "Passes over the ratings.", lower_bound=1)
flags.DEFINE_integer("batch_size", 500, "Ratings a step.", lower_bound=1)
flags.DEFINE_integer("steps_per_execution", 4, "Steps that are sent to a worker at once.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of weights and shuffle order.")
flags.DEFINE_string("history_file", None, "JSON file for losses, accuracy and throughput.")

ITEMS, GROUPS, RATERS, RATINGS = 300, 4, 1_000, 150_000


def make_ratings(users):
    draw = np.random.default_rng(1)
    likes = draw.random((GROUPS, GROUPS)) < 0.5
    group, genre = draw.integers(GROUPS, size=users), draw.integers(GROUPS, size=ITEMS)
    user = draw.choice(draw.choice(users, RATERS, replace=False), RATINGS)
    item = draw.integers(ITEMS, size=RATINGS)
    rating = likes[group[user], genre[item]] ^ (draw.random(RATINGS) < 0.1)
    data = {"user": user.astype("int32"), "item": item.astype("int32")}, rating.astype("float32")[:, None]
    cut = RATINGS * 9 // 10
    return [({k: v[part] for k, v in data[0].items()}, data[1][part]) for part in (slice(cut), slice(cut, None))]


def build_model(users):
    layers = keras.layers
    user, item = keras.Input((), dtype="int32", name="user"), keras.Input((), dtype="int32", name="item")
    spread = keras.initializers.RandomNormal(stddev=0.3)
    of_user = layers.Embedding(users, 16, embeddings_initializer=spread, name="users")(user)
    of_item = layers.Embedding(ITEMS, 16, embeddings_initializer=spread, name="items")(item)
    return keras.Model({"user": user, "item": item}, layers.Dot(axes=-1)([of_user, of_item]))


def main(_):
    tf.get_logger().setLevel("WARNING")
    strategy = tfdistkit.strategy(FLAGS.strategy)  # Workers and servers serve here until training ends.
    keras.utils.set_random_seed(FLAGS.seed)
    train, test = make_ratings(FLAGS.users)
    with strategy.scope():
        model = build_model(FLAGS.users)
        # Adagrad updates only the rows of the batch; Adam would update the whole table in every step.
        optimizer = keras.optimizers.Adagrad(0.1, initial_accumulator_value=1e-8)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        accuracy = keras.metrics.BinaryAccuracy("accuracy", threshold=0.0)
        model.compile(optimizer, loss, metrics=[accuracy], steps_per_execution=FLAGS.steps_per_execution)
    start = time.perf_counter()
    history = model.fit(*train, FLAGS.batch_size, FLAGS.epochs, verbose=2)
    rate = FLAGS.epochs * len(train[1]) / (time.perf_counter() - start)
    _, test_accuracy = model.evaluate(*test, batch_size=FLAGS.batch_size, verbose=0)
    if tfdistkit.is_chief():
        print(f"test accuracy {test_accuracy:.4f} (0.9 is the best possible), {rate:.0f} ratings per second")
        if FLAGS.history_file:
            with open(FLAGS.history_file, "w") as file:
                json.dump({**history.history, "test_accuracy": test_accuracy, "ratings_per_second": rate}, file)


if __name__ == "__main__":
    app.run(main)
