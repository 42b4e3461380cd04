"""State that the ranks of `multiworker` must agree on, which cases of one process cannot test."""

from __future__ import annotations

from pathlib import Path

from worker_processes import run_workers

SEEN = """
    import random, tfdistkit
    strategy = tfdistkit.strategy("multiworker", timeout_s=60)
    import keras, numpy as np, tensorflow as tf
    SETTINGS

    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 5
        def __getitem__(self, i):
            return np.arange(8 * i, 8 * i + 8, dtype="float32")[:, None], np.ones((8, 1), "float32")

    with strategy.scope():
        seen = tf.Variable(tf.zeros(40), aggregation=tf.VariableAggregation.SUM,
                           synchronization=tf.VariableSynchronization.ON_READ, trainable=False)
        class Count(keras.layers.Layer):
            def call(self, x, training=False):
                if training:
                    seen.assign_add(tf.reduce_sum(tf.one_hot(tf.cast(x[:, 0], tf.int32), 40), 0))
                return x
        model = keras.Sequential([keras.Input((1,)), Count(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.arange(40, dtype="float32")[:, None]
    for arguments in ({"x": x, "y": np.ones((40, 1)), "batch_size": 8}, {"x": Data(), "shuffle": True}):
        model.fit(verbose=0, epochs=3, **arguments)
        counts = seen.read_value().numpy()
        assert (counts == 3).all(), counts
        seen.assign(tf.zeros(40))
    print("every row three times")
"""


def test_rows_are_used_once_per_epoch_with_different_seeds(tmp_path: Path) -> None:
    settings = "keras.utils.set_random_seed(7 + 100 * tfdistkit.rank())"
    for printed in run_workers(SEEN.replace("SETTINGS", settings), tmp_path):
        assert "every row three times" in printed


def test_rows_are_used_once_per_epoch_without_a_seed(tmp_path: Path) -> None:
    for printed in run_workers(SEEN.replace("SETTINGS", ""), tmp_path):
        assert "every row three times" in printed


def test_a_tf_function_given_to_run_is_exact(tmp_path: Path) -> None:
    code = """
        import tfdistkit
        strategy = tfdistkit.strategy("multiworker", timeout_s=60)
        import keras, tensorflow as tf
        with strategy.scope():
            weight = keras.Variable([[1.0]])
            optimizer = keras.optimizers.SGD(0.5)
            optimizer.build([weight])
        loss = keras.losses.MeanSquaredError()

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                value = loss(y, tf.matmul(x, weight))
            optimizer.apply(tape.gradient(value, [weight]), [weight])
            return value

        data = tf.data.Dataset.from_tensor_slices(([[1.0], [2.0], [3.0]], [[0.0], [0.0], [0.0]])).batch(3)
        for batch in strategy.experimental_distribute_dataset(data):
            total = strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)
        # Computed by hand: the mean of 1, 4 and 9 is 14/3, its gradient 28/3.
        assert abs(float(total) - 14 / 3) < 1e-5, float(total)
        assert abs(float(weight.numpy()[0, 0]) - (1 - 14 / 3)) < 1e-5, weight.numpy()
        print("exact")
    """
    for printed in run_workers(code, tmp_path):
        assert "exact" in printed


def test_variables_of_every_kind_start_with_the_value_of_rank_0(tmp_path: Path) -> None:
    code = """
        import tfdistkit
        strategy = tfdistkit.strategy("multiworker", timeout_s=60)
        import numpy as np, tensorflow as tf
        kinds = ("float16", "bfloat16", "float32", "float64", "bool", "int8", "int16", "int32", "int64",
                 "uint8", "uint16", "uint32", "uint64")
        for kind in kinds:
            with strategy.scope():
                made = tf.Variable(tf.cast([1 + tfdistkit.rank(), 0], kind), dtype=kind)
                empty = tf.Variable(tf.zeros((0, 2), kind), dtype=kind)
            assert made.dtype == kind and made.numpy().astype(int).tolist() == [1, 0], (kind, made)
            assert empty.shape == (0, 2)
        print("all kinds")
    """
    for printed in run_workers(code, tmp_path):
        assert "all kinds" in printed
