"""Custom metrics in one process: under `one_device`, and without a strategy."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow


def test_a_result_may_be_the_variable() -> None:
    """As in the example of Keras's documentation of `Metric`."""
    import keras

    import tfdistkit

    class Positives(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="positives")
            self.count = self.add_variable((), "zeros", name="count")

        def update_state(self, y_true: object, y_pred: object, sample_weight: object = None) -> None:
            self.count.assign(self.count + keras.ops.sum(keras.ops.cast(y_true, "float32")))

        def result(self) -> object:
            return self.count

    x = y = np.ones((7, 1), "float32")
    with tfdistkit.strategy("one_device").scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=[Positives()])
    assert model.fit(x, y, batch_size=3, verbose=0).history["positives"] == [7.0]
    assert model.evaluate(x, y, verbose=0, return_dict=True)["positives"] == 7.0
    model.reset_metrics()
    assert model.train_on_batch(x, y, return_dict=True)["positives"] == 7.0

    alone = Positives()
    alone.update_state(y, y)
    assert float(alone.result()) == 7.0
    assert np.asarray(alone.stateless_update_state([np.float32(1)], y, y)[0]) == 8.0
