"""Randomness and nondeterminism in a dataset are found in every position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.tensorflow

THIS_FILE = Path(__file__).name


@pytest.fixture
def dataset_graph() -> Any:
    from tfdistkit.keras_adapter import dataset_graph
    from tfdistkit.strategies import keras_patches

    keras_patches.install()
    return dataset_graph


@pytest.fixture
def tf() -> Any:
    import tensorflow

    tensorflow.random.set_seed(None)
    return tensorflow


def shuffled_inside(tf: Any, seed: int | None) -> Any:
    return tf.data.Dataset.range(5).shuffle(3, seed=seed)


# Maps a description to a pipeline, built from a seed or None.
ORDERS: dict[str, Callable[[Any, int | None], Any]] = {
    "shuffle": lambda tf, seed: shuffled_inside(tf, seed).map(lambda i: i + 1).batch(2).prefetch(1),
    "in zip": lambda tf, seed: tf.data.Dataset.zip(tf.data.Dataset.range(3), shuffled_inside(tf, seed)),
    "in concatenate": lambda tf, seed: tf.data.Dataset.range(3).concatenate(shuffled_inside(tf, seed)),
    "in flat_map": lambda tf, seed: tf.data.Dataset.range(3).flat_map(lambda i: shuffled_inside(tf, seed)),
    "in interleave": lambda tf, seed: tf.data.Dataset.range(3).interleave(lambda i: shuffled_inside(tf, seed)),
    "in a parallel interleave": lambda tf, seed: tf.data.Dataset.range(3).interleave(
        lambda i: shuffled_inside(tf, seed), num_parallel_calls=2
    ),
    "in an interleave in a flat_map": lambda tf, seed: tf.data.Dataset.range(3).flat_map(
        lambda i: tf.data.Dataset.range(2).interleave(lambda j: shuffled_inside(tf, seed))
    ),
    "in group_by_window": lambda tf, seed: tf.data.Dataset.range(9).group_by_window(
        lambda i: i % 2, lambda key, part: part.shuffle(3, seed=seed).batch(2), window_size=4
    ),
    "in a window": lambda tf, seed: tf.data.Dataset.range(9).window(3).flat_map(lambda part: part.shuffle(3, seed)),
    "in snapshot": lambda tf, seed: tf.data.Dataset.range(3).snapshot(
        "unused", reader_func=lambda parts: parts.shuffle(3, seed=seed).flat_map(lambda part: part)
    ),
    "sample_from_datasets": lambda tf, seed: tf.data.Dataset.sample_from_datasets(
        [tf.data.Dataset.range(3), tf.data.Dataset.range(3)], seed=seed
    ),
    "choose_from_datasets": lambda tf, seed: tf.data.Dataset.choose_from_datasets(
        [tf.data.Dataset.range(3), tf.data.Dataset.range(3)], tf.data.Dataset.random(seed=seed).map(lambda i: i % 2)
    ),
    "Dataset.random": lambda tf, seed: tf.data.Dataset.random(seed=seed).take(3),
    "a random filter": lambda tf, seed: tf.data.Dataset.range(9).filter(
        lambda i: tf.random.uniform([], seed=seed) < 0.5
    ),
    "a random filter in a branch": lambda tf, seed: tf.data.Dataset.range(9).filter(
        lambda i: tf.random.uniform([], seed=seed) < 0.5 if i > 3 else True
    ),
    "a random take_while": lambda tf, seed: tf.data.Dataset.range(9).take_while(
        lambda i: tf.random.uniform([], seed=seed) < 0.9
    ),
    "list_files": lambda tf, seed: tf.data.Dataset.list_files(str(Path(__file__).with_name("*.py")), seed=seed),
    "shuffle_and_repeat": lambda tf, seed: tf.data.Dataset.range(3).apply(
        tf.data.experimental.shuffle_and_repeat(3, seed=seed)
    ),
}


@pytest.mark.parametrize("what", ORDERS)
def test_an_order_without_a_seed_is_found(dataset_graph: Any, tf: Any, what: str) -> None:
    (source,) = [one for one in dataset_graph.read_graph(ORDERS[what](tf, None)).random if one.decides_order]
    assert not source.is_seeded and source.seeds == (0, 0)


@pytest.mark.parametrize("what", ORDERS)
def test_seeds_of_an_order_are_read(dataset_graph: Any, tf: Any, what: str) -> None:
    (five,), (six,) = (dataset_graph.read_graph(ORDERS[what](tf, seed)).random for seed in (5, 6))
    assert 5 in five.seeds and 6 in six.seeds and five.is_seeded


def test_captured_datasets_are_read(dataset_graph: Any, tf: Any) -> None:
    outer = tf.data.Dataset.range(5).shuffle(3, seed=5)
    held = {"by a dict": [tf.data.Dataset.range(5).shuffle(3, seed=6)]}
    taken = tf.data.Dataset.range(3).flat_map(lambda i: tf.data.Dataset.zip(outer, held["by a dict"][0].take(i)))
    assert sorted(source.seeds[1] for source in dataset_graph.read_graph(taken).random) == [5, 6]


def test_values_do_not_decide_the_order(dataset_graph: Any, tf: Any) -> None:
    noisy = tf.data.Dataset.range(3).map(lambda i: tf.random.uniform([]), num_parallel_calls=2)
    (source,) = dataset_graph.read_graph(noisy).random
    assert (source.is_seeded, source.decides_order) == (False, False)
    assert f"{THIS_FILE}:" in str(source) and "in the function of a parallel `map`" in str(source)
    generator = tf.random.Generator.from_seed(1)
    assert dataset_graph.read_graph(tf.data.Dataset.range(3).map(lambda i: generator.uniform([]))).random
    assert not dataset_graph.read_graph(tf.data.Dataset.range(3).map(lambda i: i + 1).batch(2)).random


SLOPPY: dict[str, Callable[[Any], Any]] = {
    "map": lambda tf: tf.data.Dataset.range(3).map(lambda i: i, num_parallel_calls=2, deterministic=False).batch(2),
    "interleave": lambda tf: tf.data.Dataset.range(3).interleave(
        lambda i: tf.data.Dataset.range(3), num_parallel_calls=2, deterministic=False
    ),
    "batch": lambda tf: tf.data.Dataset.range(3).batch(2, num_parallel_calls=2, deterministic=False),
    "a map in flat_map": lambda tf: tf.data.Dataset.range(3).flat_map(
        lambda i: tf.data.Dataset.range(3).map(lambda j: j, num_parallel_calls=2, deterministic=False)
    ),
    "parallel_interleave": lambda tf: tf.data.Dataset.range(3).apply(
        tf.data.experimental.parallel_interleave(lambda i: tf.data.Dataset.range(3), cycle_length=2, sloppy=True)
    ),
}


@pytest.mark.parametrize("what", SLOPPY)
def test_nondeterminism_is_found(dataset_graph: Any, tf: Any, what: str) -> None:
    (found,) = dataset_graph.nondeterminism(SLOPPY[what](tf))
    assert str(found).startswith("`deterministic=False` of `")


def test_nondeterministic_options_are_found(dataset_graph: Any, tf: Any) -> None:
    options = tf.data.Options()
    options.deterministic = False
    (found,) = dataset_graph.nondeterminism(tf.data.Dataset.range(3).with_options(options).batch(2))
    assert str(found) == "`options.deterministic = False`"
    assert not dataset_graph.nondeterminism(tf.data.Dataset.range(3).map(lambda i: i, num_parallel_calls=2))


def test_large_arrays_are_not_copied(dataset_graph: Any, tf: Any) -> None:
    import numpy as np

    array = tf.zeros((1 << 20,), tf.uint8)
    graph = dataset_graph.read_graph(tf.data.Dataset.from_tensor_slices(array).shuffle(5, seed=1).batch(2))
    assert graph.arrays[0] is array
    assert ("batch", "batch_size", 2) in graph.settings and not graph.runs_python
    generator = tf.data.Dataset.from_generator(lambda: iter(np.zeros(3)), output_signature=tf.TensorSpec([]))
    assert dataset_graph.read_graph(generator.batch(2)).runs_python


def test_a_dataset_is_rebuilt_with_other_seeds(tf: Any) -> None:
    import numpy as np

    from tfdistkit.keras_adapter.dataset_seeds import WrittenDataset

    def made(seed: int) -> Any:
        columns = {
            "words": tf.constant([f"word {i}" for i in range(9)]),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(18), [2] * 9),
            "sparse": tf.sparse.from_dense(np.eye(9)),
        }
        shuffled = tf.data.Dataset.from_tensor_slices(columns).shuffle(9, seed=seed)
        return shuffled.interleave(
            lambda row: tf.data.Dataset.from_tensors(row).repeat(3).map(lambda r: (r, tf.random.uniform([], seed=seed)))
        ).batch(4)

    def read(dataset: Any) -> list[Any]:
        return [tf.nest.map_structure(lambda v: np.asarray(v).tolist(), [w["words"], n]) for w, n in dataset]

    one, other = made(3), made(4)
    for batch in other.take(1):  # A look at it: the next order is another one.
        assert batch[0]["sparse"].shape == (4, 9)
    again = WrittenDataset(other).with_seeds(WrittenDataset(one).seeds())
    assert again.element_spec == one.element_spec
    epochs = [read(one), read(one)]
    assert epochs == [read(again), read(again)] and epochs[0] != epochs[1]
