"""The policies of `tfdistkit.data.shard` and their errors; padding; shuffle orders independent of the global seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdistkit.data import coverage, from_arrays, from_files, per_replica_batch_size, shard
from tfdistkit.data.batch_rows import steps_of_own_data
from tfdistkit.data.dataset_metadata import PADDED, ROWS_OF_BATCHES, has_mark
from tfdistkit.data.element_counts import count_own, summarize
from tfdistkit.data.padding import is_padding, without_padding
from tfdistkit.data.shuffle_order import epoch_seeds, shuffled
from tfdistkit.errors import OptionError, UnsupportedError

pytestmark = pytest.mark.tensorflow

TWO = [{"num_shards": 2, "index": 0}, {"num_shards": 2, "index": 1}]


def values(dataset: tf.data.Dataset) -> list[Any]:
    return [value.tolist() for value in dataset.as_numpy_iterator()]


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """Four files of two lines."""
    paths = [tmp_path / f"{i}.txt" for i in range(4)]
    for i, path in enumerate(paths):
        path.write_text(f"{2 * i}\n{2 * i + 1}\n")
    return [str(path) for path in paths]


def test_file_policy_finds_the_files_of_a_pipeline(lines: list[str]) -> None:
    files = tf.data.Dataset.from_tensor_slices(lines)
    dataset = files.interleave(tf.data.TextLineDataset, cycle_length=2).map(tf.strings.to_number).batch(2)
    parts = [sum(values(shard(dataset, "file", **place)), []) for place in TWO]
    assert sorted(parts[0]) == [0, 1, 4, 5] and sorted(parts[1]) == [2, 3, 6, 7]
    assert sum(values(shard(dataset, "file", num_shards=1, index=0)), []) == sum(values(dataset), [])


def test_file_policy_reads_no_file_of_a_peer(lines: list[str]) -> None:
    Path(lines[1]).unlink()
    Path(lines[3]).unlink()
    dataset = tf.data.TextLineDataset(lines)
    assert values(shard(dataset, "file", **TWO[0]).map(tf.strings.to_number)) == [0, 1, 4, 5]
    assert values(from_files(lines, tf.data.TextLineDataset, **TWO[0]).map(tf.strings.to_number)) == [0, 4, 1, 5]
    with pytest.raises(tf.errors.NotFoundError):
        values(shard(dataset, "file", **TWO[1]))


def test_file_policy_without_enough_files_is_an_error(lines: list[str]) -> None:
    with pytest.raises(OptionError, match="must read files of(.|\n)*from_files"):
        shard(tf.data.Dataset.range(8), "file", **TWO[0])
    with pytest.raises(OptionError, match='at least one file per worker(.|\n)*policy="element"'):
        from_files(lines, tf.data.TextLineDataset, policy="file", num_shards=5, index=0)
    for index in range(4):  # Of a pipeline only reading tells, but it tells every worker that would get something.
        with pytest.raises(tf.errors.InvalidArgumentError, match="not enough"):
            values(shard(tf.data.TextLineDataset(lines), "file", num_shards=5, index=index))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fil"}, "Did you mean 'file'"),
        ({"even_steps": "pads"}, "Did you mean 'pad'"),
        ({"seed": 1}, 'except with policy="seed"'),
        ({"policy": "seed", "seed": -1}, "`seed` must be an integer from 0 to 2147483647"),
        ({"policy": "seed", "seed": 1.5}, "`seed` must be an integer"),
        ({"policy": "seed", "seed": 1, "buffer_size": 0}, "`buffer_size` must be an integer >= 1"),
        ({"policy": "seed"}, "`seed` must be given"),
        ({"policy": "batch"}, "must hold batches(.|\n)*batch"),
        ({"policy": "file", "even_steps": "pad"}, "`even_steps` must be None(.|\n)*data write"),
        ({"even_steps": "pad"}, "must be \\(x, y\\) or \\(x, y, sample_weight\\)"),
        ({"even_steps": "error"}, "multiple of the number of workers.* Received: 9 elements, 2 workers"),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        shard(tf.data.Dataset.range(9), **options, **TWO[0])


def test_sparse_elements_cannot_be_padded() -> None:
    sparse = tf.sparse.from_dense([[1, 0], [0, 2]])
    dataset = tf.data.Dataset.from_tensor_slices((sparse, [1, 2]))
    with pytest.raises(OptionError, match="without sparse"):
        shard(dataset, even_steps="pad", **TWO[0])


def test_batches_that_were_padded_as_elements_are_refused() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((tf.range(13.0), tf.range(13.0)))
    part = shard(dataset.batch(5), even_steps="pad", **TWO[0])
    with pytest.raises(OptionError, match="must be batched after `shard`"):
        steps_of_own_data(part, 5, replicas=2, first_replica=0, devices=1)


def test_rows_of_batches_keep_structure_and_kinds() -> None:
    ragged = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [0, 0], [3, 4], [0, 5]])
    rows = {"r": ragged, "s": sparse, "t": tf.constant(["a", "b", "c", "d", "e"])}
    dataset = tf.data.Dataset.from_tensor_slices((rows, tf.range(5.0))).batch(5)
    parts = [next(iter(shard(dataset, "batch", **place))) for place in TWO]
    assert [x["t"].numpy().tolist() for x, _ in parts] == [[b"a", b"b", b"c"], [b"d", b"e"]]
    assert [x["r"].to_list() for x, _ in parts] == [[[1], [2, 3], []], [[4, 5, 6], [7]]]
    dense = [tf.sparse.to_dense(x["s"]).numpy().tolist() for x, _ in parts]
    assert dense == [[[1, 0], [0, 2], [0, 0]], [[3, 4], [0, 5]]]
    assert all(has_mark(shard(dataset, "batch", **place).prefetch(1), ROWS_OF_BATCHES) for place in TWO)


def test_padding_differs_from_a_weight_of_zero() -> None:
    weights = tf.constant([0.0, -0.0, 2.0])
    dataset = tf.data.Dataset.from_tensor_slices(([1, 2, 3], [1, 2, 3], weights))
    parts = [shard(dataset, even_steps="pad", **place) for place in TWO]
    assert all(has_mark(part, PADDED) for part in parts)
    batches = [next(iter(part.batch(4))) for part in parts]
    assert [is_padding(weights).numpy().tolist() for _, _, weights in batches] == [[False, False], [False, True]]
    assert [without_padding(*batch)[0].numpy().tolist() for batch in batches] == [[1, 3], [2]]
    assert [without_padding(*batch)[2].numpy().tolist() for batch in batches] == [[0, 2], [0]]
    assert (batches[1][2] * tf.constant([5.0, 7.0])).numpy().tolist() == [0, 0]


def test_weights_of_outputs_and_of_time_steps_are_padded_too() -> None:
    weights = {"a": tf.ones([3, 4]), "b": tf.ones([3], tf.int32)}
    dataset = tf.data.Dataset.from_tensor_slices((tf.range(3), tf.range(3), weights))
    _, _, padded = next(iter(shard(dataset, even_steps="pad", **TWO[1]).batch(2)))
    assert padded["a"].numpy().tolist() == [[1] * 4, [0] * 4] and padded["b"].numpy().tolist() == [1, 0]
    assert is_padding(padded).numpy().tolist() == [False, True]


def test_a_worker_without_elements_pads() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(([5], [6]))
    for make in (shard, lambda _, **o: from_arrays((np.array([5]), np.array([6])), **o)):
        part = make(dataset, even_steps="pad", num_shards=3, index=2)
        assert [tuple(map(float, row)) for row in part.as_numpy_iterator()] == [(5, 6, 0)]


def test_steps_of_several_devices() -> None:
    dataset = tf.data.Dataset.from_tensor_slices((tf.range(7), tf.range(7))).batch(7)
    part = shard(dataset, "batch", even_steps="pad", **TWO[1])
    steps = steps_of_own_data(part, None, replicas=4, first_replica=2, devices=2)
    assert [x.numpy().tolist() for x, _, _ in steps] == [[4, 5], [6]]
    element = shard(tf.data.Dataset.range(7).map(lambda x: (x, x)), even_steps="pad", **TWO[1]).batch(3)
    steps = steps_of_own_data(element, 3, replicas=2, first_replica=1, devices=1)
    assert [x.numpy().tolist() for x, _, _ in steps] == [[1], [3, 5], []]
    assert steps_of_own_data(shard(dataset, **TWO[0]), 7, 2, 0, 1) is None
    # With an unknown batch size, each batch is split into one part per replica.
    steps = steps_of_own_data(element, None, replicas=2, first_replica=1, devices=1)
    assert [x.numpy().tolist() for x, _, _ in steps] == [[1, 3], [5], [], []]


def test_padding_without_weights_is_an_error() -> None:
    dataset = tf.data.Dataset.range(3).map(lambda x: (x, x))
    part = shard(dataset, even_steps="pad", **TWO[0]).map(lambda x, y, weight: (x, y))
    for use in (coverage, lambda dataset: steps_of_own_data(dataset, None, 2, 0, 1)):
        with pytest.raises(OptionError, match="must stay \\(x, y, sample_weight\\)(.|\n)*Return the third value"):
            use(part.batch(2))


def test_shuffle_orders_ignore_the_global_seed() -> None:
    def orders() -> list[Any]:
        numbers = tf.data.Dataset.range(20)
        made = [
            epoch_seeds(3),
            shuffled(numbers, 8, 3),
            shard(numbers, "seed", seed=3, **TWO[1]),
            from_arrays(np.arange(20), shuffle=True, seed=3),
        ]
        return [[values(dataset) for _ in range(2)] for dataset in made]

    found = []
    for seed in (0, 1):
        tf.random.set_seed(seed)
        found.append(orders())
    assert found[0] == found[1]
    assert all(first != second for first, second in found[0])


def test_a_seed_by_default_follows_the_global_seed() -> None:
    def order() -> list[Any]:
        tf.random.set_seed(5)
        return values(from_arrays(np.arange(20), shuffle=True))

    assert order() == order()
    assert values(from_arrays(np.arange(20), shuffle=True)) != values(from_arrays(np.arange(20), shuffle=True))


def test_several_workers_need_a_strategy_to_agree_on_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdistkit.collectives.registry._last", None)
    cluster = '{"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker", "index": 1}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    with pytest.raises(UnsupportedError, match="must be called before the first collective"):
        from_arrays(np.arange(4), shuffle=True)
    assert values(from_arrays(np.arange(4))) == [1, 3]
    assert per_replica_batch_size(5) == 2


def test_arrays_of_all_kinds() -> None:
    ragged = tf.ragged.constant([[1], [2, 3], []])
    arrays = {"s": np.array(["a", "b", "c"]), "n": (np.ones([3, 2], np.float16), ragged)}
    rows = list(from_arrays(arrays, **TWO[0]))
    assert [row["s"].numpy() for row in rows] == [b"a", b"c"]
    assert [row["n"][1].numpy().tolist() for row in rows] == [[1], []]
    wrong = [
        ((np.ones(2), 3), "with a first dimension"),
        ((np.ones(2), np.ones(3)), "Received: 2, 3 rows"),
        ((object(),), "must hold only NumPy arrays"),
    ]
    for given, message in wrong:
        with pytest.raises(OptionError, match=message):
            from_arrays(given)


@pytest.mark.parametrize(
    ("size", "place", "message"),
    [(0, {}, "must be an integer >= 1"), (2.5, {}, "must be an integer"), (4, {"num_shards": 2}, "given together")],
)
def test_invalid_batch_size_is_an_error(size: Any, place: dict[str, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        per_replica_batch_size(size, **place)


def test_datasets_are_sharded_in_a_graph(lines: list[str]) -> None:
    """As in the dataset functions of parameter-server workers."""

    @tf.function
    def sums(index: int) -> Any:
        place = {"num_shards": 2, "index": index}
        made = [
            from_arrays(np.arange(9), shuffle=True, seed=1, **place),
            shard(tf.data.Dataset.range(9), **place),
            shard(tf.data.Dataset.range(9), even_steps="drop", **place),
            from_files(lines, tf.data.TextLineDataset, shuffle=True, seed=1, **place).map(
                lambda line: tf.strings.to_number(line, tf.int64)
            ),
        ]
        return [dataset.reduce(tf.constant(0, tf.int64), lambda total, number: total + number) for dataset in made]

    parts = [[int(total) for total in sums(index)] for index in range(2)]
    assert [one + two for one, two in zip(*parts)] == [36, 36, 28, 28]


def test_coverage_counts_rows_padding_and_repeats() -> None:
    twice = tf.data.Dataset.from_tensor_slices(([1, 2, 2], [1, 2, 2]))
    found = coverage(twice)
    assert (found.times, found.distinct, found.is_exactly_once) == ({1: 1, 2: 1}, 2, False)
    assert coverage(twice.batch(2)).times == found.times
    assert coverage(twice.enumerate()).is_exactly_once
    assert coverage(twice.enumerate(), key=lambda element: element[1][0]).times == found.times
    parts = [shard(twice.enumerate(), even_steps="pad", **place).batch(2) for place in TWO]
    counted = [count_own(part, True, lambda row: row[0]) for part in parts]
    hashes = np.concatenate([hashes for hashes, _, _ in counted])
    both = summarize(hashes, np.array([[len(hashes), batches, padding] for hashes, padding, batches in counted]))
    assert (both.times, both.elements_per_rank, both.padding) == ({1: 3}, (2, 1), 1)
    assert str(both) == "3 different elements, seen: 3 x1; by rank: 2, 1, 1 rows of padding"
    for wrong in (twice.repeat(), [1, 2]):
        with pytest.raises(OptionError, match="must be a finite tf.data.Dataset"):
            coverage(wrong)
