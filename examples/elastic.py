"""Trains a net on handwritten digits with a number of workers that may change while it trains.

    tfdistkit run -np 2:3 examples/elastic.py                 # in another shell: kill -9 the process of a rank
    tfdistkit run -np 2:3 examples/elastic.py --lose_at=40    # rank 2 kills itself in step 40
    tfdistkit run -np 1:3 --host-discovery-script ./hosts.sh examples/elastic.py --seconds_per_step=0.1

Prints at the end of each epoch how many workers there are, and at the end the loss of each epoch: that of an
undisturbed run.
"""

import os
import signal
import time

import keras
from absl import app, flags
from sklearn.datasets import load_digits

import tfdistkit

FLAGS = flags.FLAGS
flags.DEFINE_integer("epochs", 6, "Passes over the training data.", lower_bound=1)
flags.DEFINE_integer("batch_size", 64, "Global batch size: rows a step, over all workers.", lower_bound=1)
flags.DEFINE_string("backup", "elastic_backup", "Folder of the backup; all hosts must see it.")
flags.DEFINE_integer("lose_at", None, "The step in which the last rank kills itself; None for no step.")
flags.DEFINE_float("seconds_per_step", 0.0, "A pause in each step, to watch changes.", lower_bound=0.0)


class Watch(keras.callbacks.Callback):
    """Shows the number of workers, and plays the accident."""

    def __init__(self):
        super().__init__()
        self.is_first_attempt = os.environ.get("TFDISTKIT_ATTEMPT", "0") == "0"

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(FLAGS.seconds_per_step)
        is_last = tfdistkit.rank() == tfdistkit.world_size() - 1
        if is_last and self.is_first_attempt and int(self.model.optimizer.iterations) == FLAGS.lose_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        if tfdistkit.is_chief():
            print(f"epoch {epoch + 1}: loss {logs['loss']:.6f} with {tfdistkit.world_size()} workers", flush=True)


def main(_):
    strategy = tfdistkit.strategy("auto")
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(100, "relu"), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.003), loss)
    # The one line that an elastic job needs. After a loss, training resumes at the last backup; a planned change makes
    # one first. The global batch size stays the same, whatever the number of workers.
    backup = tfdistkit.callbacks.BackupAndResume(FLAGS.backup, save_freq=10)
    history = model.fit(images, labels, FLAGS.batch_size, FLAGS.epochs, verbose=0, callbacks=[backup, Watch()])
    if tfdistkit.is_chief():
        print("losses:", *(f"{loss:.6f}" for loss in history.history["loss"]))


if __name__ == "__main__":
    app.run(main)
