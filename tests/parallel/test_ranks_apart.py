"""A rank that leaves `fit` alone and makes another call: an error with its position, on every rank."""

from __future__ import annotations

import re

import pytest

APART = """
    import keras, numpy as np
    x, y = np.ones((32, 2), "float32"), np.ones((32, 1), "float32")

    class Leave(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank == 0 and batch == 1:
                raise KeyError("caught")

    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    try:
        try:
            model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[Leave()])
        except KeyError:
            model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    except Exception as error:
        print(error)
"""


@pytest.mark.part(APART, ends_job=True)
@pytest.mark.parametrize("engine", ["multiworker"])
def test_a_second_fit_on_one_rank_is_an_error_on_all(printed: list[str]) -> None:
    numbers = []  # Other parts of the job may have made calls before.
    for said, where in zip(printed, ("at its start", "epoch 1 of it"), strict=True):
        assert "The ranks run different steps" in said and "StopTogether" in said, said
        found = re.search(rf"`fit` number (\d+), {where}", said)
        assert found, said
        numbers.append(int(found[1]))
    assert numbers[0] == numbers[1] + 1
