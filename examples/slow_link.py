"""Trains a net of 1.1 million weights on handwritten digits, with several ways to send less over a slow link.

    python examples/slow_link.py                                  # each of them, with two workers on this machine
    tfdistkit run -H node1,node2 examples/slow_link.py --send=power_sgd

Prints what each worker sends in a step, the time of a step, and what the model has learned.
"""

import keras
import tensorflow as tf
from absl import app, flags
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdistkit
from tfdistkit import algorithms, compression

# Each makes what `tfdistkit.strategy("multiworker", ...)` gets, in a worker. docs/communication.md tells which fits.
WAYS = {
    "none": lambda: {},
    "fp16": lambda: {"compression": "fp16"},
    "power_sgd": lambda: {"compression": compression.PowerSGD(rank=4)},
    "local_sgd": lambda: {"algorithm": algorithms.LocalSGD(every=20)},
}
FLAGS = flags.FLAGS
flags.DEFINE_enum("send", None, list(WAYS), "How this job sends; python alone tries all in turn.")
flags.DEFINE_integer("epochs", 6, "Passes over the training data.", lower_bound=2)
flags.DEFINE_integer("batch_size", 64, "Global batch size: rows a step, over all workers.", lower_bound=1)


def train(way, epochs, batch_size):
    """Trains in a worker; returns the bytes and seconds of a step, and the loss and accuracy on held-out rows."""
    tf.get_logger().setLevel("WARNING")  # absl shows INFO, where TensorFlow logs each collective
    strategy = tfdistkit.strategy("multiworker", **WAYS[way]())
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    with strategy.scope():
        layers = [keras.layers.Dense(1000, "relu"), keras.layers.Dense(1000, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    # StepTimer counts the bytes and measures the speed; without the first step, in which TensorFlow traces the model.
    timer = tfdistkit.callbacks.StepTimer(verbose=0)
    logs = model.fit(x_train, y_train, batch_size, epochs, verbose=0, callbacks=[timer]).history
    seconds = batch_size / logs["examples_per_second"][-1]
    return logs["bytes_per_step"][-1], seconds, *model.evaluate(x_test, y_test, batch_size=batch_size, verbose=0)


def show(way, sent, seconds, loss, accuracy):
    print(f"{way:<10} {sent / 1e6:>9.3f} MB {seconds * 1e3:>9.1f} ms   loss {loss:.3f}   accuracy {accuracy:.3f}")


def main(_):
    options = FLAGS.epochs, FLAGS.batch_size
    if FLAGS.send is None and tfdistkit.world_size() == 1:
        results = {way: tfdistkit.launch(train, args=(way, *options), np=2)[0] for way in WAYS}
        print(f"{'send':<10} {'a step':>12} {'a step':>12}")
        for way, result in results.items():
            show(way, *result)
        return
    way = FLAGS.send or "none"
    result = train(way, *options)
    if tfdistkit.is_chief():
        show(way, *result)


if __name__ == "__main__":
    app.run(main)
