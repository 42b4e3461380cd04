"""tfdistkit's callbacks under TensorFlow's own strategies: the error gives the reason and the replacement."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.tensorflow

SCRIPT = """
    import sys, keras, numpy as np, tensorflow as tf, tfdistkit
    from tfdistkit.errors import UnsupportedError
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    x, y = np.zeros((8, 3)), np.zeros((8, 1))
    made = tf.distribute
    def model_in(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        return model
    # Created in the list, before any other use of this package, so Keras is not patched yet.
    model = model_in(made.OneDeviceStrategy("CPU:0"))
    for strategy in (None, made.MirroredStrategy(["CPU:0", "CPU:1"]), made.MultiWorkerMirroredStrategy()):
        model = model if strategy is None else model_in(strategy)
        try:
            model.fit(x, y, verbose=0, callbacks=[tfdistkit.callbacks.BackupAndResume(sys.argv[1])])
        except UnsupportedError as error:
            print(error)
            print("--")
"""


def test_the_error_names_the_strategy(tmp_path: object) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    messages = ended.stdout.split("--\n")
    assert len(messages) == 4, ended.stderr
    for one, stock, ours in zip(
        messages,
        ("OneDeviceStrategy", "MirroredStrategy", "MultiWorkerMirroredStrategy"),
        ("one_device", "mirrored", "multiworker"),
    ):
        assert one.startswith("BackupAndResume does not work under a strategy that tfdistkit did not make")
        assert f"Received: a model in the scope of tf.distribute.{stock}(...)." in one
        assert f'Make the strategy by tfdistkit.strategy("{ours}").' in one and "BackupAndRestore works" in one
