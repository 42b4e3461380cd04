"""Exactly once for generated sizes: the shards of 1 to 7 workers, with every policy, cover the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdistkit.data import from_arrays, from_files, per_replica_batch_size, shard
from tfdistkit.data.shuffle_order import index_keys, shuffled_index
from tfdistkit.data.writing.dataset_index import serialize_row
from tfdistkit.data.writing.sources import Source
from tfdistkit.data.writing.writer import write_shards
from tfdistkit.errors import OptionError

pytestmark = pytest.mark.tensorflow

SIZES = st.integers(0, 40)
WORKERS = st.integers(1, 7)
EVEN_STEPS = st.sampled_from([None, "drop", "pad", "error"])
SEEDS = st.integers(0, 2**31 - 1)
WRITTEN = [(elements, files) for elements in (8, 12, 31) for files in (1, 2, 3, 4, 6)]


def some(examples: int) -> Callable[[Any], Any]:
    health = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=health)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """Writes numbers from 0 into files."""
    made = {}
    for elements, files in WRITTEN:
        records = [serialize_row({"": np.array(i)}) for i in range(elements)]
        source = Source("numbers", "arrays", (("", "int64", ()),), elements, lambda records=records: iter(records))
        made[elements, files] = tmp_path_factory.mktemp("written") / "numbers"
        write_shards(source, made[elements, files], files, lambda line: None)
    return made


def numbers(dataset: tf.data.Dataset) -> list[int]:
    return [int(value) for value in dataset.as_numpy_iterator()]


def real(dataset: tf.data.Dataset) -> tuple[list[int], int]:
    """Returns the elements with a weight above 0, and the number of all elements."""
    rows = [(int(x), float(w)) for x, _, w in dataset.as_numpy_iterator()]
    assert {weight for _, weight in rows} <= {0.0, 1.0}
    return [x for x, weight in rows if weight], len(rows)


def interleaved(parts: list[list[int]]) -> list[int]:
    """Interleaves shards by element, which restores the order before sharding."""
    return [part[turn] for turn in range(max(map(len, parts))) for part in parts if turn < len(part)]


def check_parts(make: Callable[[int], tf.data.Dataset], size: int, workers: int, even_steps: str | None) -> None:
    """Checks shards of (number, number), or of numbers without `even_steps`."""
    if even_steps == "error" and size % workers:
        with pytest.raises((OptionError, tf.errors.FailedPreconditionError)):
            for index in range(workers):
                list(make(index))
        return
    if even_steps == "pad":
        padded = [real(make(index)) for index in range(workers)]
        assert {count for _, count in padded} == {-(-size // workers)}
        assert sorted(sum((part for part, _ in padded), [])) == list(range(size))
        return
    parts = [[int(row[0]) for row in make(index).as_numpy_iterator()] for index in range(workers)]
    flat = sorted(sum(parts, []))
    if even_steps == "drop":
        assert {len(part) for part in parts} == {size // workers}
        assert len(set(flat)) == len(flat) and set(flat) <= set(range(size))
        return
    assert flat == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@some(14)
@given(size=SIZES, workers=WORKERS, even_steps=EVEN_STEPS, is_counted=st.booleans())
def test_shard_by_element(size: int, workers: int, even_steps: str | None, is_counted: bool) -> None:
    dataset = tf.data.Dataset.range(size).map(lambda x: (x, x))
    if not is_counted:
        dataset = dataset.filter(lambda x, y: True)
    place = {"num_shards": workers}
    check_parts(lambda i: shard(dataset, even_steps=even_steps, index=i, **place), size, workers, even_steps)


@some(12)
@given(size=SIZES, batch_size=st.integers(1, 12), workers=WORKERS, even_steps=EVEN_STEPS)
def test_shard_by_batch(size: int, batch_size: int, workers: int, even_steps: str | None) -> None:
    dataset = tf.data.Dataset.range(size).map(lambda x: (x, x)).batch(batch_size)
    batches = [x.tolist() for x, _ in dataset.as_numpy_iterator()]

    def part(index: int) -> list[Any]:
        made = shard(dataset, "batch", even_steps=even_steps, num_shards=workers, index=index)
        return list(made.as_numpy_iterator())

    if even_steps == "error" and any(len(batch) % workers for batch in batches):
        with pytest.raises((OptionError, tf.errors.InvalidArgumentError)):
            part(0)
        return
    parts = [part(index) for index in range(workers)]
    assert {len(steps) for steps in parts} == {len(batches)}
    for step, batch in enumerate(batches):
        rows = [part[step][0].tolist() for part in parts]
        lengths = {len(each) for each in rows}
        if even_steps == "drop":
            assert sum(rows, []) == batch[: len(batch) // workers * workers] and len(lengths) == 1
        elif even_steps == "pad":
            weights = np.concatenate([part[step][2] for part in parts])
            assert np.concatenate(rows)[weights > 0].tolist() == batch and len(lengths) == 1
            assert (weights == 0).sum() == -len(batch) % workers
        else:
            assert sum(rows, []) == batch and max(lengths) - min(lengths) <= 1


@some(10)
@given(size=SIZES, workers=WORKERS, even_steps=EVEN_STEPS, seed=SEEDS, shuffle=st.booleans())
def test_from_arrays(size: int, workers: int, even_steps: str | None, seed: int, shuffle: bool) -> None:
    arrays = (np.arange(size), np.arange(size))
    seeds = {"shuffle": shuffle, "seed": seed if shuffle else None}
    check_parts(
        lambda i: from_arrays(arrays, even_steps=even_steps, num_shards=workers, index=i, **seeds),
        size, workers, even_steps,
    )  # fmt: skip


@some(6)
@given(size=st.integers(1, 40), workers=WORKERS, seed=SEEDS)
def test_arrays_have_one_order_for_any_number_of_workers(size: int, workers: int, seed: int) -> None:
    place = {"shuffle": True, "seed": seed}
    parts = [from_arrays(np.arange(size), num_shards=workers, index=i, **place) for i in range(workers)]
    alone = from_arrays(np.arange(size), **place)
    epochs = [numbers(alone) for _ in range(2)]
    assert [interleaved([numbers(part) for part in parts]) for _ in range(2)] == epochs
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert size < 9 or epochs[0] != epochs[1]


def test_seeds_make_distinct_orders_of_few_elements() -> None:
    """TensorFlow's index shuffle alone has 256 orders of up to 65,536 elements, so that epochs repeat them."""
    keys = [index_keys(seed, 0) for seed in range(400)]
    positions = tf.range(12, dtype=tf.int64)
    orders = [tuple(int(shuffled_index(position, key, 12)) for position in positions) for key in keys]
    assert len(set(orders)) == len(orders) and all(sorted(order) == list(range(12)) for order in orders)


@some(10)
@given(
    written=st.sampled_from(WRITTEN), workers=WORKERS, even_steps=EVEN_STEPS, seed=SEEDS, shuffle=st.booleans(),
    policy=st.sampled_from(["auto", "file", "element"]),
)  # fmt: skip
def test_from_files(
    folders: dict, written: tuple[int, int], workers: int, even_steps: str | None, seed: int, shuffle: bool, policy: str
) -> None:
    options = {"shuffle": shuffle, "seed": seed if shuffle else None, "policy": policy, "even_steps": even_steps}

    def pair(record: Any) -> Any:
        raw = tf.io.parse_single_example(record, {"": tf.io.FixedLenFeature([], tf.string)})[""]
        return tf.io.decode_raw(raw, tf.int64)[0], tf.constant(0)

    def reader(path: Any) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path).map(pair)

    check_parts(
        lambda i: from_files(folders[written], reader, num_shards=workers, index=i, **options),
        written[0], workers, even_steps,
    )  # fmt: skip


@some(6)
@given(written=st.sampled_from(WRITTEN), workers=WORKERS, seed=st.none() | SEEDS)
def test_files_have_one_order_for_any_number_of_workers(
    folders: dict, written: tuple[int, int], workers: int, seed: int | None
) -> None:
    options = {"shuffle": seed is not None, "seed": seed}
    parts = [from_files(folders[written], num_shards=workers, index=i, **options) for i in range(workers)]
    alone = from_files(folders[written], **options)
    epochs = [numbers(alone) for _ in range(2)]
    assert [interleaved([numbers(part) for part in parts]) for _ in range(2)] == epochs
    if seed is None:
        assert epochs[0] == list(range(written[0]))
    else:
        assert sorted(epochs[0]) == list(range(written[0])) and epochs[0] != epochs[1]


@some(60)
@given(size=st.integers(1, 50), workers=WORKERS)
def test_parts_of_a_batch_are_the_batch(size: int, workers: int) -> None:
    parts = [per_replica_batch_size(size, num_shards=workers, index=i) for i in range(workers)]
    assert sum(parts) == size and max(parts) - min(parts) <= 1 and parts == sorted(parts, reverse=True)


@some(4)
@given(size=SIZES, workers=WORKERS, seed=SEEDS, policy=st.sampled_from(["seed", "off"]))
def test_seed_and_off_give_every_worker_all_elements(size: int, workers: int, seed: int, policy: str) -> None:
    seeds = {"seed": seed} if policy == "seed" else {}
    dataset = tf.data.Dataset.range(size)
    for make in (lambda **o: shard(dataset, policy, **o), lambda **o: from_arrays(np.arange(size), policy=policy, **o)):
        parts = [numbers(make(num_shards=workers, index=i, **seeds)) for i in range(workers)]
        assert all(sorted(part) == list(range(size)) for part in parts)
        if policy == "off":
            assert all(part == parts[0] for part in parts)
        elif size > 9:
            assert len(set(map(tuple, parts))) == workers
