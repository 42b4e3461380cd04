"""All ranks save a model to one file, as scripts for one process do: the file is whole, and can be read at once."""

from __future__ import annotations

import pytest
from rank_jobs import OVER_ONE

pytestmark = pytest.mark.tensorflow

SAVED = """
    import os, pathlib, tempfile, zipfile
    import keras, numpy as np

    folder = pathlib.Path(tfdistkit.collectives.broadcast_object(tempfile.mkdtemp()))
    x, y = np.random.default_rng(0).normal(size=(32, 6)).astype("float32"), np.ones((32, 1), "float32")
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(400), keras.layers.Dense(400), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", keras.losses.MeanSquaredError(), metrics=[keras.metrics.MeanAbsoluteError()])
    for number in range(4):
        model.fit(x, y, batch_size=8, verbose=0)
        model.save(folder / "model.keras")
        model.save(str(folder / "model.h5"))
        model.save_weights(str(folder / "model.weights.h5"))
        assert zipfile.ZipFile(folder / "model.keras").testzip() is None
        model.load_weights(folder / "model.weights.h5")
    for name in ("model.keras", "model.h5"):
        with strategy.scope():
            loaded = keras.models.load_model(folder / name)
        for one, other in zip(model.get_weights(), loaded.get_weights()):
            np.testing.assert_array_equal(one, other)
    tfdistkit.collectives.barrier()
    print(*sorted(one.name for one in folder.iterdir()))
"""


@pytest.mark.part(SAVED)
@pytest.mark.parametrize("engine", OVER_ONE)
def test_all_ranks_save_to_one_file(printed: list[str]) -> None:
    assert [text.splitlines()[-1] for text in printed] == ["model.h5 model.keras model.weights.h5"] * 2
