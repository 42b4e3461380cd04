"""Loops of the user's own: ranks with different data raise an error, or get one shuffle order."""

from __future__ import annotations

import json

import pytest
from rank_jobs import ENGINES, OVER_ONE

pytestmark = pytest.mark.tensorflow

COMMON = """
import json
import keras, numpy as np
import tensorflow as tf
import tfdistkit

D = tf.data.Dataset
numbers = np.arange(48)
found = {}


@tf.function(reduce_retracing=True)
def gathered(part):
    return strategy.gather(strategy.run(lambda rows: rows, args=(part,)), 0)


def lost(distribute, dataset):
    '''How many rows all ranks together did not see once, or what was raised.'''
    try:
        seen = [row for part in distribute(dataset) for row in gathered(part).numpy().tolist()]
    except tfdistkit.errors.UnsupportedError as error:
        return str(error)
    return 2 * len(numbers) - len(seen) - len(set(seen))


def rows():
    return D.from_tensor_slices(numbers)


def told(call):
    try:
        call()
    except tfdistkit.errors.TfdistkitError as error:
        return str(error)
    return "no error"
"""

LOOPS = (
    COMMON
    + """
keras.utils.set_random_seed(100 + rank)
for name in ("distribute_batches", "experimental_distribute_dataset"):
    distribute = getattr(strategy, name)
    found[f"seeds, {name}"] = lost(distribute, rows().shuffle(48).batch(8))
    found[f"shard, {name}"] = lost(distribute, rows().shard(2, rank).batch(8))
    found[f"arrays, {name}"] = lost(distribute, D.from_tensor_slices(numbers[rank::2]).batch(8))
    found[f"own part, {name}"] = lost(distribute, tfdistkit.data.shard(rows()).batch(8))
    found[f"own on one, {name}"] = lost(
        distribute, tfdistkit.data.shard(rows(), num_shards=2, index=0).batch(8) if rank else rows().batch(8))
strategy.check_data = False
found["turned off"] = lost(strategy.distribute_batches, rows().shard(2, rank).batch(8)) != 0
strategy.check_data = True


def trained(is_loaded, in_graph=True):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="out")])
        optimizer = keras.optimizers.SGD(0.01)
    if is_loaded and rank == 0:
        model.set_weights([one + 1.0 for one in model.get_weights()])

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x)) / 48
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    run = lambda x: strategy.run(step, args=(x,))
    run = tf.function(run) if in_graph else run
    for x in strategy.experimental_distribute_dataset(D.from_tensor_slices(np.ones((8, 1), "float32")).batch(4)):
        run(x)


with strategy.scope():
    weight, optimizer = tf.Variable([1.0 + rank]), keras.optimizers.SGD(0.1)
    optimizer.build([weight])
if rank == 0:
    weight.assign([5.0])
update = tf.function(lambda: strategy.run(lambda: optimizer.apply([tf.constant([1.0])], [weight])))
found["a variable of TensorFlow"] = told(update)
metric = keras.metrics.Mean()
found["a metric outside of the scope"] = told(lambda: strategy.run(lambda: metric.update_state(1.0)))
with strategy.scope():
    metric = keras.metrics.Mean()
found["a metric in the scope"] = told(lambda: strategy.run(lambda: metric.update_state(1.0)))
for is_loaded in (False, True):
    found[f"loaded {is_loaded}"] = told(lambda: trained(is_loaded))
    found[f"loaded {is_loaded}, eager"] = told(lambda: trained(is_loaded, in_graph=False))
print(json.dumps(found))
"""
)


@pytest.mark.parametrize("engine", OVER_ONE)
@pytest.mark.part(LOOPS)
def test_loops_read_the_same_data(printed: list[str]) -> None:
    one, two = (json.loads(text.splitlines()[-1]) for text in printed)
    assert one == two
    assert one.pop("turned off") is True
    assert "A metric must be made within `strategy.scope()`" in one["a metric outside of the scope"]
    assert one["a metric in the scope"] == "no error"
    assert "on rank 1 differs from that on rank 0 by up to 4" in one["a variable of TensorFlow"]
    for eager in ("", ", eager"):  # Weights that one rank alone has loaded are told before the first update.
        assert one[f"loaded False{eager}"] == "no error"
        assert (
            "their weights differ" in one[f"loaded True{eager}"]
            and "/out/kernel` on rank 1" in one[f"loaded True{eager}"]
        )
    for name in ("distribute_batches", "experimental_distribute_dataset"):
        assert one[f"seeds, {name}"] == one[f"own part, {name}"] == 0, one
        same = f"All ranks must give `strategy.{name}` the same data"
        assert same in one[f"shard, {name}"] and "shard(index=0) on rank 0, shard(index=1)" in one[f"shard, {name}"]
        assert same in one[f"arrays, {name}"] and "they differ in the arrays" in one[f"arrays, {name}"]
        assert "whether the data was divided by rank already" in one[f"own on one, {name}"]


BATCHES = (
    COMMON
    + """
def made():
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


x, y = np.random.default_rng(0).normal(size=(64, 4)).astype("float32"), np.arange(64.0, dtype="float32")[:, None]
own = np.random.default_rng(rank)


def calls(*, to, of=None, method="train_on_batch", **options):
    '''Calls with the same batch, and from some call on with what `of` returns.'''
    model = made()
    for number in range(1, to + 1):
        args = of() if of is not None and number >= options.get("begin", 1) else (x[:8], y[:8])
        getattr(model, method)(*args)


def drawn():
    rows = own.integers(0, 64, 8)
    return x[rows], y[rows]


found["drawn"] = told(lambda: calls(to=3, of=drawn))
found["of test_on_batch"] = told(lambda: calls(to=1, of=drawn, method="test_on_batch"))
found["of predict_on_batch"] = told(lambda: calls(to=1, of=lambda: drawn()[:1], method="predict_on_batch"))
found["predictions"] = told(lambda: calls(to=3, of=lambda: (x[:8],), method="predict_on_batch"))
found["drawn in call 3"] = told(lambda: calls(to=4, of=drawn, begin=3))
found["its own half"] = told(lambda: calls(to=1, of=lambda: (x[rank:rank + 8 + rank], y[rank:rank + 8 + rank])))
found["noise"] = told(lambda: calls(to=1, of=lambda: (own.normal(size=(8, 4)), np.ones((8, 1)))))
found["one argument more"] = told(lambda: calls(to=1, of=lambda: (x[:8], y[:8], np.ones(8))[: 2 + rank]))
found["tensors"] = told(lambda: calls(to=1, of=lambda: [tf.constant(one) for one in drawn()]))
found["equal"] = told(lambda: calls(to=9))
found["rounding"] = told(lambda: calls(to=2, of=lambda: (x[:8] * np.float32(1 + 1e-6 * rank), np.ones((8, 1)))))
found["augmented"] = told(lambda: calls(to=2, of=lambda: (x[:8] + own.normal(size=(8, 4)), y[:8])))
strategy.check_data = False
found["turned off"] = told(lambda: calls(to=2, of=drawn))
strategy.check_data = True
print(json.dumps(found))
"""
)

IN_BATCHES = {
    "drawn": "batch of call 1 on rank 1 differs from that on rank 0. Received: a difference in the values of `x`, `y`",
    "of test_on_batch": "All ranks must give `test_on_batch` the same whole batch",
    "of predict_on_batch": "All ranks must give `predict_on_batch` the same whole batch",
    "drawn in call 3": "the batch of call 4 on rank 1",
    "its own half": "shapes or dtypes of `x`: float32 [8, 4] on rank 0, float32 [9, 4] on rank 1",
    "noise": "a difference in the values of `x` on rank 1",
    "one argument more": "the arguments: x, y on rank 0, x, y, sample_weight on rank 1",
    "tensors": "the values of `x`, `y`",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.part(BATCHES)
def test_whole_batches_are_compared(printed: list[str]) -> None:
    one, two = (json.loads(text.splitlines()[-1]) for text in printed)
    assert one == two
    for case, words in IN_BATCHES.items():
        assert words in one[case], (case, one[case])
    assert "keras.utils.set_random_seed" in one["drawn"] and "check_data=False" in one["drawn"]
    assert {case: text for case, text in one.items() if case not in IN_BATCHES} == dict.fromkeys(
        ("equal", "predictions", "rounding", "augmented", "turned off"), "no error"
    )
