"""Optimizers that differ between ranks, or whose gradients travel otherwise, are refused on all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_jobs import ENGINES, RunRanks, runner

pytestmark = pytest.mark.tensorflow

SCRIPT = """
    import json, sys
    import tfdistkit
    from tfdistkit.compression import FP16, Chain, OneBitAdam, PowerSGD, QAdam, Where
    strategy, rank = tfdistkit.strategy(sys.argv[1]), tfdistkit.rank()
    import keras, numpy as np, tensorflow as tf
    x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")

    def fit(make):
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(make(), "mse")
        model.fit(x, y, batch_size=4, verbose=0)

    def chosen(predicate, names=("dense", "top")):
        def built():
            strategy.reducer = Where(predicate, Chain(PowerSGD(2), FP16()))
            with strategy.scope():
                layers = [keras.layers.Dense(4, name=names[0]), keras.layers.Dense(1, name=names[1])]
                model = keras.Sequential([keras.Input((3,)), *layers])
                model.compile("sgd", "mse")
            model.fit(x, y, batch_size=4, verbose=0)
        try:
            return told(built)
        finally:
            strategy.reducer = tfdistkit.communication.Average()

    def loop(make, compiled):
        with strategy.scope():
            weight, optimizer = keras.Variable([[1.0]]), make()
        def step():
            optimizer.apply([tf.ones([1, 1])], [weight])
        run = lambda: strategy.run(step)
        with strategy.scope():
            (tf.function(run) if compiled else run)()
        return weight.numpy().item()

    def told(call, *args):
        try:
            call(*args)
        except tfdistkit.errors.OptionError as error:
            return str(error)
        return "built"

    random = np.random.default_rng(0)
    decay = keras.optimizers.schedules.ExponentialDecay
    found = {
        "freeze_after": told(fit, lambda: OneBitAdam(1e-3, freeze_after=5 + rank)),
        "warmup_steps": told(fit, lambda: QAdam(1e-3, warmup_steps=3 + rank)),
        "accumulation": told(fit, lambda: OneBitAdam(1e-3, freeze_after=5, gradient_accumulation_steps=2 + rank)),
        "momentum": told(fit, lambda: keras.optimizers.SGD(0.1, momentum=0.5 + 0.25 * rank)),
        "schedule": told(fit, lambda: keras.optimizers.SGD(decay(0.1, 10 * (rank + 1), 0.9))),
        "class": told(fit, lambda: keras.optimizers.Adam() if rank else keras.optimizers.SGD()),
        "eager loop": told(loop, lambda: OneBitAdam(freeze_after=5 + rank), False),
        "loop": told(loop, lambda: OneBitAdam(freeze_after=5 + rank), True),
        "equal eager loop": told(loop, lambda: OneBitAdam(freeze_after=5), False),
        "equal loop": told(loop, lambda: OneBitAdam(freeze_after=5), True),
        "names": told(fit, lambda: keras.optimizers.Adam(name=f"own{rank}")),
        "predicate": chosen(lambda v: "kernel" in v.path and (rank == 1 or "top" in v.path)),
        "path": chosen(lambda v: "/dense/kernel" in v.path, (("dense", "top"), ("dense_1", "top"))[rank]),
        "equal predicate": chosen(lambda v: "kernel" in v.path, (f"dense{rank}", "top")),
        "random of one seed": chosen(lambda v: "kernel" in v.path or bool(random.integers(2))),
        # Variables, which are made with the value of rank 0, and compared in each epoch (test_training_comparison).
        "rates": told(fit, lambda: keras.optimizers.SGD(0.1 * (rank + 1))),
    }
    print(json.dumps(found))
"""

REFUSED = {
    "freeze_after": ("`freeze_after` of the optimizer OneBitAdam", "rank 0: 5; rank 1: 6"),
    "warmup_steps": ("`warmup_steps` of the optimizer QAdam", "rank 0: 3; rank 1: 4"),
    "accumulation": ("`gradient_accumulation_steps` of the optimizer OneBitAdam", "rank 0: 2; rank 1: 3"),
    "momentum": ("`momentum` of the optimizer SGD", "rank 0: 0.5; rank 1: 0.75"),
    "schedule": ("`learning_rate` of the optimizer SGD", "'decay_steps': 10"),
    "class": ("The optimizer must be the same", "rank 0: 'SGD'; rank 1: 'Adam'"),
    "eager loop": ("`freeze_after` of the optimizer OneBitAdam", "rank 0: 5; rank 1: 6"),
    "loop": ("`freeze_after` of the optimizer OneBitAdam", "rank 0: 5; rank 1: 6"),
    "predicate": (
        "variable 0: ",
        "/dense/kernel` of shape (3, 4) and float32, by Average on rank 0; ",
        ", by Chain(PowerSGD(",
    ),
    "path": ("/dense/kernel` of shape (3, 4) and float32, by Chain(", "/dense_1/kernel` of shape (3, 4)", "Average on"),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_options_that_differ_are_told_to_all_ranks(request: pytest.FixtureRequest, engine: str, tmp_path: Path) -> None:
    run: RunRanks = runner(request)
    ranks = [json.loads(text.splitlines()[-1]) for text in run(engine, SCRIPT, tmp_path)]
    assert ranks[0] == ranks[1]
    for name, words in REFUSED.items():
        assert all(word in ranks[0][name] for word in words), f"{name}: {ranks[0][name]}"
    assert {name: text for name, text in ranks[0].items() if name not in REFUSED} == dict.fromkeys(
        ("equal eager loop", "equal loop", "names", "equal predicate", "random of one seed", "rates"), "built"
    )
