"""Records Keras's functions, and results of models without a strategy: `python run_untouched.py WAY OUT.json`.

WAY is `without` (tfdistkit cannot be imported), `imported`, or `after_strategy` (one was made in this process).
"""

from __future__ import annotations

import hashlib
import json
import sys
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from keras import optimizers as opt


def attributes() -> dict[str, int]:
    """Returns the identity of every function and class of Keras, and of every function of those classes."""
    found: dict[str, int] = {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith("keras.src") or module is None:
            continue
        for attribute, value in vars(module).items():
            if isinstance(value, (types.FunctionType, type)):
                found[f"{name}:{attribute}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                for method, member in vars(value).items():
                    if isinstance(member, types.FunctionType):
                        found[f"{name}:{attribute}.{method}"] = id(member)
    return found


def train(model: keras.Model, optimizer: Any, **options: Any) -> str:
    """Trains and returns a digest of the weights, the losses and the predictions."""
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    random = np.random.RandomState(0)
    x, y = random.randn(103, 10).astype("float32"), random.randn(103, 1).astype("float32")
    losses = model.fit(x, y, batch_size=32, epochs=2, verbose=0, validation_split=0.2).history
    losses["evaluate"] = model.evaluate(x, y, verbose=0)
    parts = [np.asarray(losses[name]).tobytes() for name in sorted(losses)]
    parts += [np.asarray(weight).tobytes() for weight in model.weights]
    parts.append(model.predict(x, verbose=0).tobytes())
    parts.append(repr((float(model.optimizer.iterations), model.train_on_batch(x, y))).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def trained() -> list[str]:
    """Trains models that call every hook: clipping, accumulation, loss scaling, dropout, statistics."""
    digests = []
    for optimizer, options in (
        (opt.Adam(0.01), {}),
        (opt.SGD(0.1, clipnorm=0.1, gradient_accumulation_steps=2), {}),
        (opt.LossScaleOptimizer(opt.Adam(0.01, use_ema=True)), {"steps_per_execution": 2}),
        (opt.AdamW(0.01, global_clipnorm=0.5), {"run_eagerly": True}),
    ):
        keras.utils.set_random_seed(3)
        stack = layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(1)
        digests.append(train(keras.Sequential([keras.Input((10,)), *stack]), optimizer, jit_compile=False, **options))
    return digests


def main(way: str, out: str) -> None:
    """Writes the record of this process."""
    before = attributes()
    if way == "without":
        sys.modules["tfdistkit"] = None  # type: ignore[assignment]  # Makes every import of it an ImportError.
    else:
        import tfdistkit

        assert tfdistkit.__version__
    if way == "after_strategy":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
        )
        strategy = tfdistkit.strategy("mirrored", devices=2)
        with strategy.scope():
            train(keras.Sequential([keras.Input((10,)), layers.Dense(1)]), "sgd")
    after = attributes()
    changed = [name for name, identity in before.items() if after.get(name) != identity]
    with open(out, "w") as file:
        json.dump({"names": len(before), "changed": changed, "trained": trained()}, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
