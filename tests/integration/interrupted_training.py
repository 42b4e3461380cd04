"""A training that SLURM interrupts, and starts again, comes to what it comes to without: to the last bit."""

from __future__ import annotations

# SLURM looks at time limits twice a minute: SIGUSR1 comes 130 to 160 s after the start, on a busy machine long after
# TensorFlow was loaded, and long after all is done when it has started again.
OPTIONS = ("--nnodes", "2", "-np", "2", "--time", "4", "--backup-before", "80")

# Slow until it is interrupted: it would take longer than SLURM lets it.
TRAIN = """
    import os, time
    import numpy as np
    import keras, tfdistkit
    strategy = tfdistkit.strategy("multiworker")
    numbers = np.random.default_rng(1)
    x, y = (numbers.normal(size=(40, width)).astype("float32") for width in (5, 1))
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # A variable of the script that a callback changes would be in the backup.
            os.environ.setdefault("FIRST_STEP", str(int(self.model.optimizer.iterations)))
            time.sleep(0 if restarts else 0.8)

    def train(*callbacks):
        keras.utils.set_random_seed(7)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.05), "mse")
        model.fit(x, y, batch_size=8, epochs=60, verbose=0, callbacks=list(callbacks))
        return model.get_weights()

    weights = train(Slow(), tfdistkit.callbacks.BackupAndResume("backup"))
    without = train()
    same = all(np.array_equal(one, other) for one, other in zip(weights, without))
    first = os.environ["FIRST_STEP"]
    told = f"RESULT restarts {restarts}, begins at step 1: {first == '1'}, the same weights: {same}"
    os.write(1, (told + chr(10)).encode())
"""
