"""Runs in each process of a trial, `python -m tfdistkit.doctor.probe NAME`, and exits with 0 if the strategy works.

Runs an all-reduce, and one training step whose result is known. TensorFlow is loaded by the strategy.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

import tfdistkit

# y = x, one weight that starts at 0, squared error, the whole batch at once: the gradient is -2 * mean(x * x).
_X = (1.0, 2.0, 3.0, 4.0)
_RATE = 0.01
_EXPECTED = _RATE * 2 * sum(x * x for x in _X) / len(_X)
# Strategies with collectives of user code.
_WITH_COLLECTIVES = ("multiworker", "horovod")
# Two replicas in one process, so that they communicate.
_OPTIONS = {"mirrored": {"devices": 2}, "central_storage": {"devices": 2}, "horovod": {"timeout_s": 30}}
DONE = "tfdistkit doctor: "


def main() -> None:
    """Tries the strategy that the first argument names."""
    name = sys.argv[1]
    strategy = tfdistkit.strategy(tfdistkit.strategies.StrategyName(name), **_OPTIONS.get(name, {}))
    started = time.perf_counter()
    if name in _WITH_COLLECTIVES:
        count = tfdistkit.world_size()
        total = float(tfdistkit.collectives.all_reduce(float(tfdistkit.rank() + 1)))
        if total != count * (count + 1) / 2:
            sys.exit(f"The all-reduce of 1 to {count} must be {count * (count + 1) // 2}. Received: {total:g}.")
    weight = _weight_after_one_step(strategy)
    if abs(weight - _EXPECTED) > 1e-6:
        sys.exit(f"The weight after one training step must be {_EXPECTED:.8f}. Received: {weight:.8f}.")
    print(DONE + json.dumps({"seconds": round(time.perf_counter() - started, 3)}), flush=True)


def _weight_after_one_step(strategy: object) -> float:
    # Imported by name: this wing must not load Keras, but a process of a trial has it already.
    keras, numpy = importlib.import_module("keras"), importlib.import_module("numpy")
    x = numpy.array(_X, "float32").reshape(-1, 1)
    with strategy.scope():  # type: ignore[attr-defined]
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(_RATE), "mse")
    model.fit(x, x, batch_size=len(_X), epochs=1, shuffle=False, verbose=0)
    return float(model.get_weights()[0][0, 0])


if __name__ == "__main__":
    main()
