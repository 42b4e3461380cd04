"""`tfdistkit.data.shard`: the shards cover the dataset, each element exactly once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tensorflow as tf

import tfdistkit
from tfdistkit.data import shard

pytestmark = pytest.mark.tensorflow

SIZES = (0, 1, 2, 3, 4, 7, 8, 33)
OFF = tf.data.experimental.AutoShardPolicy.OFF


def elements(dataset: tf.data.Dataset) -> list[Any]:
    return [value.tolist() for value in dataset.as_numpy_iterator()]


def flat(batches: list[list[int]]) -> list[int]:
    return [value for batch in batches for value in batch]


@pytest.mark.parametrize("num_shards", (1, 2, 3, 4))
@pytest.mark.parametrize("size", SIZES)
def test_shards_cover_the_dataset_exactly_once(size: int, num_shards: int) -> None:
    dataset = tf.data.Dataset.range(size)
    parts = [elements(shard(dataset, num_shards=num_shards, index=index)) for index in range(num_shards)]
    assert sorted(value for part in parts for value in part) == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("num_shards", (1, 2, 3, 4))
@pytest.mark.parametrize("batch_size", (1, 4, 5))
@pytest.mark.parametrize("size", SIZES)
def test_shards_cover_the_dataset_before_and_after_batch(size: int, batch_size: int, num_shards: int) -> None:
    dataset = tf.data.Dataset.range(size)
    for pipeline in (
        lambda index: shard(dataset, num_shards=num_shards, index=index).batch(batch_size),
        lambda index: shard(dataset.batch(batch_size), num_shards=num_shards, index=index),
    ):
        parts = [flat(elements(pipeline(index))) for index in range(num_shards)]
        assert sorted(value for part in parts for value in part) == list(range(size))


def steps_of_all(dataset: tf.data.Dataset, num_shards: int, batch_size: int) -> list[list[int]]:
    """Returns the rows of each step of all workers: tf.distribute splits each batch into one step per worker."""
    steps: list[list[int]] = []
    for index in range(num_shards):
        # The sizes differ by at most one, and each worker begins with its own.
        sizes = [batch_size // num_shards + (i < batch_size % num_shards) for i in range(num_shards)]
        part = shard(dataset, num_shards=num_shards, index=index).batch(batch_size)
        for number, rows in enumerate(elements(part.rebatch(sizes[index:] + sizes[:index]))):
            steps += [[] for _ in range(number + 1 - len(steps))]
            steps[number] += rows
    return [sorted(step) for step in steps]


@pytest.mark.parametrize(("num_shards", "batch_size"), [(2, 4), (2, 32), (3, 6), (3, 33), (4, 4), (4, 32)])
@pytest.mark.parametrize("size", (8, 33, 97, 103))
def test_steps_of_shards_are_the_batches_of_one_process(size: int, num_shards: int, batch_size: int) -> None:
    dataset = tf.data.Dataset.range(size)
    assert steps_of_all(dataset, num_shards, batch_size) == elements(dataset.batch(batch_size))


@pytest.mark.parametrize(("num_shards", "batch_size"), [(2, 7), (3, 32), (4, 6)])
@pytest.mark.parametrize("size", (8, 33, 97, 103))
def test_steps_keep_the_batch_size_that_workers_do_not_divide(size: int, num_shards: int, batch_size: int) -> None:
    steps = steps_of_all(tf.data.Dataset.range(size), num_shards, batch_size)
    assert sorted(flat(steps)) == list(range(size))
    assert all(len(step) == batch_size for step in steps[: size // batch_size - 1])


def test_shard_is_marked_against_a_second_sharding() -> None:
    part = shard(tf.data.Dataset.range(8), num_shards=2, index=0)
    later = part.shuffle(8).map(lambda x: x + 1).batch(2).prefetch(1)
    assert later.options().experimental_distribute.auto_shard_policy == OFF


@pytest.mark.parametrize("num_shards", (1, 2))
def test_second_call_on_a_pipeline_is_an_error(num_shards: int) -> None:
    part = shard(tf.data.Dataset.range(8), num_shards=num_shards, index=0)
    together = tf.data.Dataset.zip((part, tf.data.Dataset.range(4)))
    for dataset in (part, part.map(lambda x: x).batch(2), together):
        with pytest.raises(tfdistkit.errors.OptionError, match="must not be sharded before.*\n.*Remove"):
            shard(dataset, num_shards=num_shards, index=0)


def test_dataset_with_auto_sharding_off_can_be_sharded() -> None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = OFF
    assert elements(shard(tf.data.Dataset.range(4).with_options(options), num_shards=2, index=1)) == [1, 3]


def test_shard_index_comes_from_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert elements(shard(tf.data.Dataset.range(4))) == [0, 1, 2, 3]
    cluster = {"worker": ["localhost:12345", "localhost:12346", "localhost:12347"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 2}}))
    assert elements(shard(tf.data.Dataset.range(7))) == [2, 5]


def test_a_coordinator_reads_all_for_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"chief": ["localhost:1"], "worker": ["localhost:2", "localhost:3"], "ps": ["localhost:4"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}}))
    assert elements(shard(tf.data.Dataset.range(7))) == list(range(7))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"num_shards": 2}, "given together"),
        ({"index": 0}, "given together"),
        ({"num_shards": 0, "index": 0}, "`num_shards` must be an integer >= 1"),
        ({"num_shards": 2, "index": 2}, "`index` must be an integer from 0 to 1"),
        ({"num_shards": 2, "index": -1}, "`index` must be an integer from 0 to 1"),
        ({"num_shards": 2.0, "index": 0}, "`num_shards` must be an integer"),
        ({"num_shards": True, "index": 0}, "`num_shards` must be an integer"),
    ],
)
def test_invalid_shard_is_an_error(place: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard(tf.data.Dataset.range(4), **place)


@pytest.mark.parametrize("wrong", ([1, 2, 3], iter([1]), None))
def test_an_argument_that_is_no_dataset_is_an_error(wrong: Any) -> None:
    with pytest.raises(tfdistkit.errors.OptionError, match="must be a tf.data.Dataset(.|\n)*from_tensor_slices"):
        shard(wrong)
