"""Loops of the user's own: ranks with different data raise an error, or get one shuffle order."""

from __future__ import annotations

import json

import pytest
from rank_jobs import OVER_ONE

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
print(json.dumps(found))
"""
)


@pytest.mark.parametrize("engine", OVER_ONE)
@pytest.mark.part(LOOPS)
def test_loops_read_the_same_data(printed: list[str]) -> None:
    one, two = (json.loads(text.splitlines()[-1]) for text in printed)
    assert one == two
    assert one.pop("turned off") is True
    for name in ("distribute_batches", "experimental_distribute_dataset"):
        assert one[f"seeds, {name}"] == one[f"own part, {name}"] == 0, one
        same = f"All ranks must give `strategy.{name}` the same data"
        assert same in one[f"shard, {name}"] and "shard(index=0) on rank 0, shard(index=1)" in one[f"shard, {name}"]
        assert same in one[f"arrays, {name}"] and "they differ in the arrays" in one[f"arrays, {name}"]
        assert "whether the data was divided by rank already" in one[f"own on one, {name}"]
