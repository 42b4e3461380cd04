"""Ranks agree on data: a default seed, coverage, parts of batches."""

from __future__ import annotations

import json

import pytest
from rank_jobs import ENGINES

pytestmark = pytest.mark.tensorflow

EACH_ENGINE = pytest.mark.parametrize("engine", [one for one in ENGINES if "mpi" not in str(one)])

AGREES = """
import json
import numpy as np
import tensorflow as tf
from tfdistkit import collectives, data

found = {}
arrays = data.from_arrays((np.arange(13), np.arange(13)), shuffle=True)  # rank 0 chooses the seed
found["orders"] = [[int(x) for x, _ in arrays.as_numpy_iterator()] for _ in range(2)]
found["sharded"] = str(data.coverage(arrays.batch(4), key=lambda row: row[0]))
found["padded"] = str(data.coverage(data.from_arrays((np.arange(13), np.arange(13)), even_steps="pad").batch(4)))
found["split by fit"] = str(data.coverage(tf.data.Dataset.range(13).batch(4)))
found["lost"] = str(data.coverage(data.shard(tf.data.Dataset.range(rank, 13 + rank), num_shards=2, index=rank)))
found["off"] = str(data.coverage(data.shard(tf.data.Dataset.range(13), "off")))
found["own batch"] = data.per_replica_batch_size(5)

# A custom training loop: padded shards take the same steps, and the weights make the sum right.
total = steps = 0.0
for x, y, weight in data.from_arrays((np.arange(13.0), np.arange(13)), even_steps="pad").batch(2):
    total += float(collectives.all_reduce(tf.reduce_sum(tf.cast(x, tf.float32) * weight)))
    steps += 1
found["loop"] = [total, steps]
# The same by the strategy, which takes an iterator over whole steps.
steps = []
part = data.shard(tf.data.Dataset.range(13).map(lambda i: (i, i)).batch(5), "batch", even_steps="pad")
for x, y, weight in strategy.experimental_distribute_dataset(part):
    steps.append(strategy.experimental_local_results(x)[0].numpy().tolist())
found["steps"] = steps
print(json.dumps(found))
"""


@EACH_ENGINE
@pytest.mark.part(AGREES)
def test_ranks_agree_about_data(printed: list[str]) -> None:
    one, two = (json.loads(text) for text in printed)
    for first, second in zip(one["orders"], two["orders"]):
        assert sorted(first + second) == list(range(13)) and len(first) == 7
    assert one["orders"][0] != one["orders"][1]
    assert one["sharded"] == two["sharded"] == "13 different elements, seen: 13 x1; by rank: 7, 6"
    assert one["padded"] == two["padded"] == "13 different elements, seen: 13 x1; by rank: 7, 6, 1 rows of padding"
    assert one["split by fit"] == two["split by fit"] == "13 different elements, seen: 13 x1; by rank: 7, 6"
    assert one["off"] == "13 different elements, seen: 13 x2; by rank: 13, 13"
    # Each rank took every second element of a different order.
    assert one["lost"] == two["lost"] == "7 different elements, seen: 1 x1, 6 x2; by rank: 7, 6"
    assert (one["own batch"], two["own batch"]) == (3, 2)
    assert one["loop"] == two["loop"] == [78, 4]
    assert [a + b for a, b in zip(one["steps"], two["steps"])] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12]]


PREPARES = """
import json, pathlib
import numpy as np
import tensorflow_datasets as tfds
import tfdistkit
from tfdistkit import data


class Squares(tfds.core.GeneratorBasedBuilder):
    '''Numbers and their squares; two files.'''

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {"number": np.int64, "square": np.int64}
        keys = ("number", "square")
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=keys)

    def _split_generators(self, dl_manager):
        pathlib.Path(f"prepared-by-{rank}").touch()
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(9):
            yield i, {"number": i, "square": i * i}


builder = Squares(data_dir=str(folder / "tfds"))
part = data.from_tfds(builder, as_supervised=True, download=True, shuffle=True)
print(json.dumps([[int(number) for number, _ in part.as_numpy_iterator()], str(data.coverage(part.batch(2))),
                  [path.name for path in pathlib.Path.cwd().glob("prepared-by-*")]]))
"""


@pytest.mark.parametrize("engine", ["multiworker"])
@pytest.mark.part(PREPARES)
def test_one_rank_prepares_and_all_read(printed: list[str]) -> None:
    (one, *seen), (two, *seen_too) = (json.loads(text.splitlines()[-1]) for text in printed)
    assert sorted(one + two) == list(range(9))
    assert seen == seen_too == ["9 different elements, seen: 9 x1; by rank: 5, 4", ["prepared-by-0"]]
