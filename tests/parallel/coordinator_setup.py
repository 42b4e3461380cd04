"""Setup of the parts of a shared job of a coordinator, workers and a server: data, and models that count."""

from __future__ import annotations

import json

# Every row carries its number, once for the layer that counts what was trained on, and once for the metrics.
# It needs a `strategy`, and `N` rows in batches of `BATCH`.
COUNTING = """
    import functools, json
    import keras, numpy as np, tensorflow as tf

    features = np.random.default_rng(0).normal(size=(N, 4)).astype("float32")
    labels = (features[:, 0] + 0.3 * features[:, 1] > 0).astype("float32")
    x = np.concatenate([features, np.arange(N)[:, None]], 1).astype("float32")
    y = np.stack([labels, np.arange(N)], 1).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y))

    def ones(numbers):
        "A one for each row that was seen."
        return tf.reduce_sum(tf.one_hot(tf.cast(numbers, "int32"), N), 0)

    class Counted(keras.layers.Layer):
        "How often each row was trained on, in a weight that is no metric."
        def build(self, shape):
            self.rows = self.add_weight(shape=(N,), initializer="zeros", trainable=False, name="rows")
        def call(self, x, training=False):
            if training:
                self.rows.assign_add(ones(x[:, -1]))
            return x[:, :-1]

    class Once(keras.metrics.Metric):
        "How many rows were seen exactly once."
        def __init__(self, name="once"):
            super().__init__(name=name)
            self.rows = self.add_variable((N,), "zeros", name="rows")
        def update_state(self, y, p, sample_weight=None):
            self.rows.assign(self.rows + ones(y[:, 1]))
        def result(self):
            return tf.reduce_sum(tf.cast(tf.equal(self.rows, 1.0), "float32"))

    class Seen(keras.metrics.Sum):
        "How many rows were seen."
        def update_state(self, y, p, sample_weight=None):
            super().update_state(tf.ones_like(y[:, 1]))

    class AUC(keras.metrics.AUC):
        def update_state(self, y, p, sample_weight=None):
            super().update_state(y[:, :1], p, sample_weight)

    def crossentropy(y, p):
        return keras.losses.binary_crossentropy(y[:, :1], p)

    def accuracy(y, p):
        return keras.metrics.binary_accuracy(y[:, :1], p)

    def metrics():
        return [Once(), Seen(name="seen"), accuracy, AUC(name="auc")]

    def sequential(*layers):
        return keras.Sequential([keras.Input((5,)), Counted(), *layers, keras.layers.Dense(1, activation="sigmoid")])

    def make(*layers, optimizer=lambda: keras.optimizers.SGD(0.05), **options):
        "A model made for the workers; what belongs to it is made by functions, in the scope."
        with strategy.scope():
            model = sequential(*(layer() for layer in layers))
            model.compile(optimizer(), crossentropy, metrics=metrics(), **options)
        return model

    @functools.cache  # Traced once.
    def plain(steps_per_execution=1):
        return make(lambda: keras.layers.Dense(8, activation="relu"), steps_per_execution=steps_per_execution)

    def train(model, *args, epochs=3, **options):
        "Trains, and returns what each epoch saw, how many steps there were, and how often each row was used."
        steps, counts = int(model.optimizer.iterations), model.layers[0].rows.numpy()
        history = model.fit(*args, epochs=epochs, verbose=0, **options).history
        used = (model.layers[0].rows.numpy() - counts).astype(int).tolist()
        return {**history, "steps": int(model.optimizer.iterations) - steps, "used": used}

    def report(**found):
        print(json.dumps(found))
"""

ROWS, STEPS = 90, 12

SETUP = (
    """
    import tfdistkit
    strategy = tfdistkit.strategy(engine, timeout_s=200, heartbeat_timeout_s=60)
    N, BATCH = 90, 8
"""
    + COUNTING
)


def last_report(printed: list[str]) -> dict:
    """Returns the last line that the coordinator printed in a part."""
    return json.loads(printed[0].splitlines()[-1])
