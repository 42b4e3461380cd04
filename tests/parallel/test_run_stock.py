"""A script with TensorFlow's own strategy under `tfdistkit run`: the report names the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_process import run_job, write_script

SCRIPT = """
    import sys
    import keras, numpy as np, tensorflow as tf
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.zeros((8, 3)), np.zeros((8, 1)))).batch(4)
    model.fit(data, verbose=0, callbacks=[keras.callbacks.BackupAndRestore(sys.argv[1])])
"""


@pytest.mark.tensorflow
def test_keras_under_a_strategy_of_tensorflow(tmp_path: Path) -> None:
    ended = run_job("-np", "2", write_script(tmp_path, SCRIPT), str(tmp_path / "backup"), cwd=tmp_path)
    assert ended.code == 1
    report = ended.stderr.partition("the first failure was")[2]
    assert "Keras 3 cannot train in several processes under tf.distribute.MultiWorkerMirroredStrategy" in report
    assert 'Make the strategy by tfdistkit.strategy("multiworker")' in report
