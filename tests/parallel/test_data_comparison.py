"""Ranks with different data raise an error before a step runs, or get one shuffle order."""

from __future__ import annotations

import json
import re

import pytest
from rank_jobs import ENGINES, OVER_ONE

pytestmark = pytest.mark.tensorflow

EACH_ENGINE = pytest.mark.parametrize("engine", [one for one in ENGINES if "mpi" not in str(one)])

COMMON = """
import json
import time
import keras, numpy as np
import tensorflow as tf
import tfdistkit
from tfdistkit import data

D = tf.data.Dataset
ROWS = 97
x = np.arange(ROWS, dtype="float32")[:, None] / ROWS
numbers = np.arange(ROWS)


class SeenRows(keras.metrics.Metric):
    '''How often each row was seen, by all ranks.'''

    def __init__(self):
        super().__init__(name="seen")
        self.times = self.add_variable((ROWS,), initializer="zeros", name="times")

    def update_state(self, y, predictions, sample_weight=None):
        y = keras.ops.cast(keras.ops.reshape(y, (-1,)), "int32")
        self.times.assign_add(keras.ops.sum(keras.ops.one_hot(y, ROWS), axis=0))

    def result(self):
        return keras.ops.sum(self.times)


with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", lambda y, p: keras.ops.mean(p, -1) * 0.0, metrics=[SeenRows()])


def lost(given, **options):
    '''Trains; how many rows were not seen once an epoch, or what was raised.'''
    try:
        model.fit(given, epochs=options.pop("epochs", 1), verbose=0, **options)
    except tfdistkit.errors.UnsupportedError as error:
        return str(error)
    seen = model.metrics[-1].metrics[0].times.value.numpy()
    return int((seen != 1).sum())


def arrays():
    return D.from_tensor_slices((x, numbers))


found = {}
"""

MADE_EQUAL = (
    COMMON
    + """
keras.utils.set_random_seed(100 + rank)
found["seeds by rank"] = lost(arrays().shuffle(ROWS).batch(16), epochs=2)
off = tf.data.Options()
off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
found["a part for each, off"] = lost(arrays().take(96).shard(2, rank).batch(8).with_options(off)) - 1
found["inside interleave"] = lost(
    D.range(4).interleave(lambda i: arrays().shard(4, i).shuffle(30), num_parallel_calls=2).batch(16))
found["sample_from_datasets"] = lost(D.sample_from_datasets([arrays().take(40), arrays().skip(40)]).batch(16))
found["arrays"] = [lost(x, y=numbers, batch_size=16)]
signature = (tf.TensorSpec([1]), tf.TensorSpec([], tf.int64))
found["a generator"] = lost(
    D.from_generator(lambda: zip(x, numbers), output_signature=signature).shuffle(ROWS).batch(16))
found["a generator in shard"] = lost(
    data.shard(D.from_generator(lambda: zip(x, numbers), output_signature=signature)).shuffle(9).batch(16), epochs=2)
found["noise in shard"] = lost(data.shard(D.from_generator(
    lambda: ((a + 0.1 * rank, b) for a, b in zip(x, numbers)), output_signature=signature)).batch(16))
found["repeated in shard"] = lost(
    data.shard(D.from_generator(lambda: zip(x, numbers), output_signature=signature)).repeat().batch(16),
    steps_per_epoch=5, epochs=4) >= 0
table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(numbers, numbers), -1)
found["a table"] = lost(arrays().map(lambda a, b: (a, table.lookup(b))).shuffle(9).batch(16))
found["unlike options"] = lost(arrays().shuffle(ROWS, seed=rank).batch(16).prefetch(1 + rank))
keras.utils.set_random_seed(7)
if rank == 0:
    tf.random.uniform([])
found["a number on the chief"] = lost(arrays().shuffle(ROWS).map(lambda a, b: (a, b)).batch(16))
keras.utils.set_random_seed(7)
looked_at = arrays().shuffle(ROWS).batch(16)
if rank == 0:
    next(iter(looked_at))
found["a look on the chief"] = lost(looked_at, epochs=3)
again = arrays().shuffle(ROWS).batch(16).repeat()
if rank == 0:
    next(iter(again))
found["a look, repeated"] = lost(again, steps_per_epoch=7, epochs=2) >= 0
parts = data.shard(arrays().shuffle(ROWS, seed=rank)).batch(16)
found["shard"] = lost(parts)
found["augmented"] = lost(arrays().shuffle(ROWS).map(
    lambda a, b: (a + tf.random.uniform([]), b), num_parallel_calls=4).batch(16))
keras.utils.set_random_seed(5 + rank)
noise = keras.layers.GaussianNoise(0.1)
found["a layer that augments"] = lost(arrays().batch(16).map(lambda a, b: (noise(a, training=True), b)))


def batches():
    for number in range(24):
        time.sleep(0.02 * rank)  # The pipelines of the ranks read ahead by other numbers of batches.
        yield x[4 * number : 4 * number + 4], numbers[4 * number : 4 * number + 4]


model.fit(batches(), steps_per_epoch=4, epochs=2, validation_data=batches(), validation_steps=5, verbose=0)
found["validation by a generator"] = np.flatnonzero(model.metrics[-1].metrics[0].times.value.numpy()).tolist()
again = batches()
for _ in range(2):
    model.fit(again, steps_per_epoch=3, verbose=0)
found["a generator twice"] = np.flatnonzero(model.metrics[-1].metrics[0].times.value.numpy()).tolist()
print(json.dumps(found))
"""
)


@EACH_ENGINE
@pytest.mark.part(MADE_EQUAL)
def test_seeds_are_made_equal(printed: list[str]) -> None:
    one, two = (json.loads(text.splitlines()[-1]) for text in printed)
    assert one == two
    assert one.pop("a look, repeated") is one.pop("repeated in shard") is True
    assert one.pop("arrays") == [0]
    # Each pass begins with the batches that show the shapes, 0 and 1; batch 5 was read ahead.
    assert one.pop("validation by a generator") == [*range(8), *range(24, 36)]
    assert one.pop("a generator twice") == [*range(16, 28)]
    assert one == dict.fromkeys(one, 0)


TOLD = (
    COMMON
    + """
import random
found["by rank"] = lost(x[rank::2], y=numbers[rank::2], batch_size=16)
found["by rank, equal halves"] = lost(D.from_tensor_slices((x[:96][rank::2], numbers[:96][rank::2])).batch(16))
found["shard"] = lost(arrays().shard(2, rank).batch(16))
found["skip"] = lost(arrays().take(96).skip(rank * 48).take(48).batch(16))
options = tf.data.Options()
options.deterministic = False
off = tf.data.Options()
off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
found["off"] = lost(arrays().shuffle(9, seed=1).batch(16).with_options(off))
by_file = tf.data.Options()
by_file.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
found["by file"] = lost(arrays().batch(16).with_options(by_file))
found["options"] = lost(arrays().with_options(options).batch(16))
found["map"] = lost(arrays().map(lambda a, b: (a, b), num_parallel_calls=2, deterministic=False).batch(16))
found["interleave"] = lost(D.range(3).interleave(
    lambda i: arrays().shard(3, i), num_parallel_calls=2, deterministic=False).batch(16))


def rows():
    order = np.random.default_rng(rank).permutation(ROWS)
    yield from ((x[i], numbers[i]) for i in order)


def batches():
    order = np.random.default_rng(rank).permutation(ROWS)
    for part in np.array_split(order, 6):
        yield x[part], numbers[part]


signature = (tf.TensorSpec([1], tf.float32), tf.TensorSpec([], tf.int64))
found["generator"] = lost(D.from_generator(rows, output_signature=signature).batch(16))
found["Python generator"] = lost(batches(), steps_per_epoch=6)
found["a shuffled generator"] = lost(D.from_generator(rows, output_signature=signature).shuffle(9, seed=rank).batch(16))

found["a generator in shard"] = lost(data.shard(D.from_generator(rows, output_signature=signature)).batch(16))
found["a generator of batches in shard"] = lost(data.shard(
    D.from_generator(rows, output_signature=signature).batch(16), "batch"))
calls = []


def other_rows_later():
    calls.append(1)
    order = np.random.default_rng(rank * (len(calls) > 1)).permutation(ROWS)
    yield from ((x[i], numbers[i]) for i in order)


later = D.from_generator(other_rows_later, output_signature=signature)
found["later in shard"] = [lost(data.shard(later).batch(16), epochs=2), len(calls)]


def refused(make):
    try:
        return str(make())
    except tfdistkit.errors.UnsupportedError as error:
        return str(error)


def named(*names):
    return [str(folder / name) for name in names]


found["from_arrays"] = refused(lambda: data.from_arrays((np.random.default_rng(rank).permutation(x), numbers)))
found["rows of from_arrays"] = refused(lambda: data.from_arrays(x[rank::2]))
ragged = tf.ragged.constant([[1] * ((i + rank) % 3) for i in range(96)])
found["ragged from_arrays"] = refused(lambda: data.from_arrays(ragged))
found["seed of from_arrays"] = refused(lambda: data.from_arrays(x, shuffle=True, seed=rank))
found["from_files"] = refused(lambda: data.from_files(named("a", "b", "c", "d")[rank::2]))
found["seed of from_files"] = refused(lambda: data.from_files(named("a", "b"), shuffle=True, seed=rank))
found["own rows"] = refused(lambda: data.from_arrays(x[rank::2], policy="off"))


from tfdistkit.keras_adapter import dataset_seeds
largest, dataset_seeds._LARGEST_BYTES = dataset_seeds._LARGEST_BYTES, 10
found["too large"] = lost(arrays().shuffle(9, seed=rank).batch(16))
dataset_seeds._LARGEST_BYTES = largest


class Own(keras.utils.PyDataset):
    def __init__(self, at_end):
        super().__init__(workers=2)
        self.order, self.at_end = np.arange(ROWS), at_end

    def __len__(self):
        return 7

    def __getitem__(self, i):
        part = self.order[i * 16 : (i + 1) * 16]
        return x[part], numbers[part]

    def on_epoch_end(self):
        if self.at_end:
            np.random.default_rng(rank).shuffle(self.order)


found["the second epoch"] = lost(Own(True), epochs=2)
found["batch size"] = lost(arrays().batch(16 + rank))
found["spec"] = lost(D.from_tensor_slices((x, numbers.astype("int32" if rank else "int64"))).batch(16))
found["steps"] = lost(arrays().repeat().batch(16), steps_per_epoch=3 + rank)
found["repeated parts"] = lost(data.from_arrays((x, numbers)).repeat().batch(16), steps_per_epoch=6)
found["repeated even parts"] = lost(data.shard(arrays().take(96)).repeat().batch(16), steps_per_epoch=6)
import warnings
with warnings.catch_warnings(record=True) as told:
    lost(data.shard(arrays()).take(8).batch(4))
found["take from a part"] = [str(one.message) for one in told]
found["own part on one"] = lost(data.shard(arrays(), num_shards=2, index=0).batch(16) if rank else arrays().batch(16))
found["class weights"] = lost(x, y=numbers, class_weight={i: 1.0 + rank for i in range(ROWS)})
words = np.array([f"word {i}" for i in range(ROWS)])
try:
    model.evaluate(D.from_tensor_slices((x, numbers)).batch(16 if rank else 32), verbose=0)
except tfdistkit.errors.UnsupportedError as error:
    found["evaluate"] = str(error)
try:
    model.fit(x, numbers, validation_data=(x[rank::2][:40], numbers[rank::2][:40]), verbose=0)
except tfdistkit.errors.UnsupportedError as error:
    found["validation"] = str(error)
try:
    model.predict(x[rank:], verbose=0)
except tfdistkit.errors.UnsupportedError as error:
    found["predict"] = str(error)
try:
    model.predict(x, verbose=0) if rank else model.evaluate(x, numbers, verbose=0)
except tfdistkit.errors.UnsupportedError as error:
    found["other calls"] = str(error)
with strategy.scope():
    measured = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    measured.compile("sgd", "mse", metrics=["mae"] * (1 - rank))
try:
    measured.fit(x, numbers, verbose=0)
except tfdistkit.errors.UnsupportedError as error:
    found["metrics"] = str(error)
try:
    data.shard(arrays().skip(rank))
except tfdistkit.errors.UnsupportedError as error:
    found["data.shard"] = str(error)
strategy.check_data = False
found["turned off"] = lost(arrays().take(96).shard(2, rank).batch(16)) > 40
strategy.check_data = True
found["as before"] = lost(arrays().batch(16))
print(json.dumps(found))
"""
)

# Parts of each message.
EXPECTED = {
    "by rank": "keras.utils.set_random_seed(7) before the data is made",
    "by rank, equal halves": "the arrays",
    "shard": "Received: shard(index=0) on rank 0, shard(index=1) on rank 1",
    "skip": "Received: skip(count=0) on rank 0, skip(count=48) on rank 1",
    "off": "With `AutoShardPolicy.OFF` every rank must bring rows of its own to `fit`",
    "by file": "A dataset with `AutoShardPolicy.FILE` must read files",
    "options": "`options.deterministic = False`",
    "map": "`deterministic=False` of `map`",
    "interleave": "`deterministic=False` of `interleave`",
    "generator": "the first batch of an epoch on rank 1 differs from that on rank 0",
    "Python generator": "the first batch of an epoch on rank 1 differs",
    "a shuffled generator": "the first batch of an epoch on rank 1 differs",
    "a generator in shard": "the Python generator yields other elements, or another order, on rank 1 than on rank 0",
    "a generator of batches in shard": "the Python generator yields other elements",
    "later in shard": "the Python generator yields other elements",
    "from_arrays": "All ranks must give `tfdistkit.data.from_arrays` the same data",
    "rows of from_arrays": "tfdistkit.data selects each rank's part",
    "ragged from_arrays": "they differ in the arrays",
    "seed of from_arrays": "they differ in an argument. Received: seed=0 on rank 0, seed=1 on rank 1",
    "from_files": "Received: a from element 0, all elements on rank 0, b from element 0, all elements on rank 1",
    "seed of from_files": "Received: seed=0 on rank 0, seed=1 on rank 1",
    "own rows": "Dataset",
    "too large": "cannot be rebuilt",
    "the second epoch": "the first batch of an epoch on rank 1 differs",
    "batch size": "batch(batch_size=16) on rank 0, batch(batch_size=17) on rank 1",
    "spec": "shapes or dtypes of the elements",
    "steps": "the number of steps",
    "repeated parts": "Received: 49 elements on rank 0 and 48 elements on rank 1",
    "repeated even parts": "1",
    "take from a part": "`take` should come before tfdistkit.data divides the data of `fit`",
    "own part on one": "whether the data was divided by rank already",
    "class weights": "`class_weight`",
    "metrics": "they differ in the number of metrics. Received: 1 on rank 0, 0 on rank 1",
    "evaluate": "All ranks must give `evaluate` the same data",
    "validation": "All ranks must give `validation_data` the same data",
    "predict": "All ranks must give `predict` the same data",
    "other calls": "rank 0: `evaluate`",
    "data.shard": "All ranks must give `tfdistkit.data.shard` the same data",
}


@pytest.mark.parametrize("engine", OVER_ONE)
@pytest.mark.part(TOLD)
def test_all_ranks_raise_an_error_that_names_the_difference(printed: list[str]) -> None:
    one, two = (json.loads(text.splitlines()[-1]) for text in printed)
    assert one.pop("turned off") is two.pop("turned off") is True
    assert one.pop("as before") == two.pop("as before") == 0
    for case, words in EXPECTED.items():
        assert words in str(one[case]) and words in str(two[case]), (case, one[case])
    assert re.search(r"Look at part\d*\.py:\d+: `found.*shard\(2, rank\)", one["shard"])
    assert "check_data=False" in one["generator"]


FILES = (
    COMMON
    + """
import os, tempfile
from tfdistkit.collectives import broadcast_object

folder = broadcast_object(tempfile.mkdtemp())
places = {"first": x, "second": x[::-1].copy()}
found = {}


def cached(name, of=arrays):
    return of().cache(os.path.join(folder, name)).batch(8)


found["one file"] = lost(cached("one"))
found["a file of each rank"] = lost(cached(f"own{rank}"))
if rank == 0:
    list(cached("whole"))
broadcast_object(None)
found["a complete file"] = lost(cached("whole"))
found["a complete file of one part"] = lost(cached("whole", lambda: data.shard(arrays())))
if rank == 0:
    list(arrays().batch(8).cache(os.path.join(folder, "sharded")))
broadcast_object(None)
found["a complete file, sharded"] = lost(data.shard(arrays().batch(8).cache(os.path.join(folder, "sharded"))))
found["not written yet"] = [name for name in os.listdir(folder) if name.startswith("one")]


def stacked(*order):
    pairs = D.from_tensor_slices((places, numbers)).batch(8)
    return pairs.map(lambda of, y: (tf.concat([of[name] for name in order], 1)[:, :1], y))


found["columns in another order"] = lost(stacked(*(["first", "second"] if rank else ["second", "first"])))
found["columns in one order"] = lost(stacked("second", "first"))
found["rounded"] = lost(arrays().batch(8).map(lambda of, y: (of * (1.0 + 1e-6 * rank), y)))
found["augmented"] = lost(arrays().batch(8).map(lambda of, y: (of + tf.random.uniform(tf.shape(of)), y)))
print(json.dumps(found))
"""
)


@pytest.mark.parametrize("engine", OVER_ONE)
@pytest.mark.part(FILES)
def test_files_of_caches_and_values_of_equal_rows(printed: list[str]) -> None:
    one, two = (json.loads(text.splitlines()[-1]) for text in printed)
    assert one == two
    assert one.pop("not written yet") == []
    for case in ("one file", "a complete file of one part"):
        assert "Each rank must have a file of its own for `.cache(filename)`" in one.pop(case), case
    assert "a difference in the values of 1 of 2 tensors" in one.pop("columns in another order")
    assert one == dict.fromkeys(one, 0)
