"""Loads a saved model where tfdistkit cannot be imported: `python load_alone.py MODEL.keras OUT.npz`."""

from __future__ import annotations

import sys

sys.modules["tfdistkit"] = None  # type: ignore[assignment]  # Makes every import of it an ImportError.
try:
    import tfdistkit  # noqa: F401
except ImportError:
    pass
else:
    raise SystemExit("tfdistkit was there")

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from data import make_data  # noqa: E402  (beside this file)

assert not tf.distribute.has_strategy()
model = keras.models.load_model(sys.argv[1])
arrays = {}
for kind, variables in (("weights", model.weights), ("optimizer", model.optimizer.variables)):
    for number, variable in enumerate(v for v in variables if "seed" not in v.path):
        value = np.asarray(variable)
        arrays[f"{kind}.{number:03}"] = value.astype("float32") if value.dtype.kind == "f" else value
x, _ = make_data("numbers", 115)
arrays["prediction"] = model.predict(x, batch_size=32, verbose=0)
np.savez(sys.argv[2], **arrays)
