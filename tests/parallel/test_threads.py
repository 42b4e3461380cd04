"""A long training starts no more threads than a short one: a process that has too many dies."""

from __future__ import annotations

import json

import pytest
from rank_jobs import ENGINES

pytestmark = pytest.mark.tensorflow

TRAIN = """
    import json, os
    import keras, numpy as np, tensorflow as tf
    from tfdistkit import collectives

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    x, y = np.ones((400, 4), "float32"), np.ones((400, 1), "float32")

    def run():
        model.fit(x, y, batch_size=8, verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)
        collectives.all_reduce(tf.ones([2]))
        return len(os.listdir("/proc/self/task"))

    print(json.dumps([run(), run(), run()]))
"""


@pytest.mark.part(TRAIN)
@pytest.mark.parametrize("engine", [one for one in ENGINES if "mpi" not in str(one)])
def test_threads_do_not_become_more(printed: list[str]) -> None:
    for text in printed:
        first, _, last = json.loads(text)
        assert last <= first + 100  # TensorFlow's own pools vary a little; 300 steps more have 1,000 collectives.
