"""Checks that a new process can repeat the order of a dataset."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import CHOSEN_SEED, GIVEN_SEED, SHARDED, has_mark, marks_of
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api, private_datasets
from tfdistkit.keras_adapter.dataset_graph import read_graph

# Transformations whose iterator creates that of their input, and those which create it for the first element. Others
# (`repeat`, `cache`, unknown ones) may create it later, or several times.
_CREATING = frozenset(
    ("Map", "ParallelMap", "Batch", "ParallelBatch", "PaddedBatch", "DenseToRagged", "DenseToSparseBatch", "Prefetch")
    + ("Take", "Skip", "Filter", "TakeWhile", "Shard", "Unique", "IgnoreErrors", "FlatMap", "Interleave", "Zip", "Scan")
    + ("ParallelInterleave", "Unbatch", "Restructured", "Window", "Rebatch", "GroupByWindow", "DirectedInterleave")
    + ("Options", "AssertCardinality", "Variant")
)
_CREATING_LATER = frozenset(("Shuffle", "CopyToDevice"))


class Reads(enum.IntEnum):
    """What of an epoch determines the order of the next one."""

    NOTHING = 0  # only that its iterator is created
    FIRST_BATCH = 1
    ALL = 2


def order_of(x: Any, same_order: bool) -> list[Any]:
    """Returns the seeds that determine the elements of a dataset and their order.

    Args:
        x: The argument of `fit`.
        same_order: Whether an order that changes with every run is an error.

    Raises:
        UnsupportedError: if the order changes with every run, with `same_order`.
    """
    if not isinstance(x, tf.data.Dataset):
        return []
    graph = read_graph(x)
    deciding = [one for one in graph.random if one.decides_order]
    seeds = [list(one.seeds) for one in deciding]
    if has_mark(x, SHARDED):  # The seeds of tfdistkit.data are in its marks, for any number of workers.
        seeds = [list(private_datasets.seeds_of_dataset(one) or ()) for one, _ in _parts(x) if _shuffles(one)]
    why = next((f"{one} without a seed" for one in deciding if not one.is_seeded), None)
    if why is None and private_api.global_seed() is None and any(m.startswith(CHOSEN_SEED) for m in marks_of(x)):
        why = "`shuffle=True` without a seed"
    if why is None and graph.nondeterminism:
        why = str(graph.nondeterminism[0])
    if why is None or not same_order:
        of_data = [mark.rpartition(":")[2] for mark in marks_of(x) if mark.startswith((CHOSEN_SEED, GIVEN_SEED))]
        return seeds + [[int(seed)] for seed in of_data]
    raise UnsupportedError(
        explain(
            "The data must have an order that a new process can repeat: else elements would be seen twice after a "
            "restart.",
            received=f"a dataset with {why}",
            do="Call keras.utils.set_random_seed(7) before the dataset is created, or write `shuffle(..., seed=7)`, "
            "and `deterministic=True`; BackupAndResume(..., same_order=False) accepts another order.",
        )
    )


def require_separate_order(x: Any, others: Any) -> None:
    """Raises an error if reading other data advances the shuffle order of the training data.

    Args:
        x: The argument `x` of `fit`.
        others: Other data that `fit` or a callback reads.

    Raises:
        UnsupportedError: if both share a `shuffle` that draws a new order for each iterator.
    """
    if not isinstance(x, tf.data.Dataset):
        return
    own = {id(one) for one, _ in _parts(x) if _reshuffles(one)}
    read = [one for one in tf.nest.flatten(others) if isinstance(one, tf.data.Dataset)]
    if any(id(one) in own for dataset in read for one, _ in _parts(dataset)):
        raise UnsupportedError(
            explain(
                "Training and validation data must not share a `shuffle` that draws a new order for each iterator: "
                "validation rows would be trained on, and no restart could repeat the order of the epoch.",
                received="`x` and `validation_data` that share a `shuffle`, such as `data.skip(n)` and `data.take(n)`",
                do="Write `shuffle(..., reshuffle_each_iteration=False)` before the split; or split first, and shuffle "
                "only the training data. BackupAndResume(..., same_order=False) accepts it unchanged.",
            )
        )


def reads_again(x: Any) -> Reads:
    """Returns what a new process must read of earlier epochs, besides creating their iterators, to repeat the order.

    A `shuffle` draws the order of an epoch when its own iterator is created. Most transformations create that of their
    input with their own. A `shuffle` and a copy to a device create it for their first element, the second part of
    `concatenate` comes when the first one has ended, and what is before `repeat` or `cache`, twice in one dataset or
    outside of a function that uses it draws while the epoch is read.

    Args:
        x: The argument of `fit`.
    """
    if not isinstance(x, tf.data.Dataset) or int(x.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return Reads.NOTHING
    seen: set[int] = set()
    reads = Reads.NOTHING
    for one, of_part in _parts(x):
        if _reshuffles(one):
            reads = max(reads, Reads.ALL if id(one) in seen else of_part)
        seen.add(id(one))
    return reads


def _parts(dataset: Any, reads: Reads = Reads.NOTHING) -> Iterator[tuple[Any, Reads]]:
    """Yields a dataset and all of its inputs, each with what must be read for its iterator to be created."""
    yield dataset, reads
    kind = private_datasets.kind_of_dataset(dataset)
    once = kind == "Repeat" and private_datasets.number_of_dataset(dataset, "_count") == 1
    own = Reads.ALL
    if kind in _CREATING or once:
        own = Reads.NOTHING
    elif kind in _CREATING_LATER:
        own = Reads.FIRST_BATCH
    for place, (one, times) in enumerate(private_datasets.inputs_and_times(dataset)):
        is_first_part = kind == "Concatenate" and place == 0
        yield from _parts(one, Reads.ALL if times > 1 else max(reads, Reads.NOTHING if is_first_part else own))
    for wrapper in private_datasets.functions_of_dataset(dataset):
        variants = [outer for outer, _ in private_datasets.graph_of(wrapper).captures if outer.dtype == tf.variant]
        for one in private_datasets.datasets_of_variants(variants, wrapper):
            yield from _parts(one, Reads.ALL)


def shuffles(x: Any) -> bool:
    """Returns whether a dataset contains a `shuffle` of the user."""
    return isinstance(x, tf.data.Dataset) and any(_shuffles(one) for one, _ in _parts(x))


def reshuffles(x: Any) -> bool:
    """Returns whether each iterator over a dataset has a new order."""
    return isinstance(x, tf.data.Dataset) and any(_reshuffles(one) for one, _ in _parts(x))


def _shuffles(dataset: Any) -> bool:
    return private_datasets.kind_of_dataset(dataset).startswith("Shuffle")


def _reshuffles(dataset: Any) -> bool:
    """Returns whether each iterator has a new order."""
    if private_datasets.kind_of_dataset(dataset) == "Random":
        return bool(private_datasets.number_of_dataset(dataset, "_rerandomize"))
    return _shuffles(dataset) and private_datasets.number_of_dataset(dataset, "_reshuffle_each_iteration") != 0


def other_order(seeds: list[Any], expected: list[Any]) -> UnsupportedError:
    """Returns the error for data whose shuffle seeds differ from the backup."""
    return UnsupportedError(
        explain(
            "The data must have the order of the run of the backup: else elements would be seen twice.",
            received=f"a dataset that shuffles by the seeds {seeds}",
            expected=f"the seeds {expected}",
            do="Call keras.utils.set_random_seed with the same number in every run, before the dataset is created; "
            "BackupAndResume(..., same_order=False) accepts another order.",
        )
    )


def other_parts(parts: int, expected: int) -> UnsupportedError:
    """Returns the error for data that the user sharded differently from the backup."""
    return UnsupportedError(
        explain(
            "Data that each worker shards itself must have as many shards as in the run of the backup.",
            received=f"{parts} shards",
            expected=f"{expected} shards",
            do="Start as many workers as before, or shard with tfdistkit.data.shard.",
        )
    )


def other_batches(now: int | None, expected: int | None) -> UnsupportedError:
    """Returns the error for data whose number of batches differs from the backup."""
    return UnsupportedError(
        explain(
            "An epoch must have as many batches as in the run of the backup.",
            received=f"{now} batches",
            expected=f"{expected} batches, the same data with the same global batch size",
            do="To restart the epoch with other data, pass BackupAndResume(..., accept_changes=True).",
        )
    )


def other_executions(done: int, each: int) -> UnsupportedError:
    """Returns the error for a `steps_per_execution` that skips the step of the backup."""
    return UnsupportedError(
        explain(
            "`steps_per_execution` must divide the step of the backup within its epoch.",
            received=f"steps_per_execution={each}, a backup after {done} steps of an epoch",
            do="Pass the same `steps_per_execution` as in the run of the backup.",
        )
    )
