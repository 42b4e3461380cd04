"""Whether the order of a dataset can be made again in a new process, and what that takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import CHOSEN_SEED, GIVEN_SEED, SHARDED, has_mark, marks_of
from tfdistkit.errors import UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.keras_adapter.dataset_graph import read_graph

# They go through what is before them more than once, or keep its first order.
_REPEATING = ("Repeat", "Cache", "Snapshot", "ShuffleAndRepeat")


def order_of(x: Any, same_order: bool) -> list[Any]:
    """Returns the seeds that decide which elements of a dataset come, and in what order.

    Args:
        x: The argument of `fit`.
        same_order: Whether an order that is new in every run is an error.

    Raises:
        UnsupportedError: if `same_order`, and it is.
    """
    if not isinstance(x, tf.data.Dataset):
        return []
    graph = read_graph(x)
    deciding = [one for one in graph.random if one.decides_order]
    seeds = [list(one.seeds) for one in deciding]
    if has_mark(x, SHARDED):  # What tfdistkit.data shuffles by is in its marks, for any number of workers.
        seeds = [list(private_api.seeds_of_dataset(one) or ()) for one, _ in _parts(x) if _shuffles(one)]
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
            "After a restart the data would come in another order, so that elements of an epoch would be seen twice.",
            received=f"a dataset with {why}",
            expected="an order that a new process can repeat",
            do="Call keras.utils.set_random_seed(7) before the dataset is made, or write `shuffle(..., seed=7)`, and "
            "`deterministic=True`; BackupAndResume(..., same_order=False) accepts another order.",
        )
    )


def require_order_of_its_own(x: Any, others: Any) -> None:
    """Raises an error if data that is read beside the training data moves its order on.

    Args:
        x: The argument `x` of `fit`.
        others: What else `fit` or a callback reads.

    Raises:
        UnsupportedError: if both come out of one `shuffle` that makes a new order for each iterator.
    """
    if not isinstance(x, tf.data.Dataset):
        return
    own = {id(one) for one, _ in _parts(x) if _reshuffles(one)}
    read = [one for one in tf.nest.flatten(others) if isinstance(one, tf.data.Dataset)]
    if any(id(one) in own for dataset in read for one, _ in _parts(dataset)):
        raise UnsupportedError(
            explain(
                "Training and validation come out of one `shuffle`, which makes a new order whenever either is read: "
                "rows of the one get into the other in every epoch, and no restart finds the order of the epoch again.",
                received="`x` and `validation_data` that share a `shuffle`, such as `data.skip(n)` and `data.take(n)`",
                expected="a split that stays",
                do="Write `shuffle(..., reshuffle_each_iteration=False)` before the split; or split first, and shuffle "
                "the training data alone. BackupAndResume(..., same_order=False) accepts it as it is.",
            )
        )


def must_be_read_again(x: Any) -> bool:
    """Whether earlier epochs have to be read to find the order of one: an iterator over each is not enough.

    A `shuffle` makes a new order when an iterator over it is made: once an epoch, unless it stands before `repeat` or
    `cache`, twice in one dataset, or outside of a function that uses it.

    Args:
        x: The argument of `fit`.
    """
    if not isinstance(x, tf.data.Dataset) or int(x.cardinality()) == tf.data.INFINITE_CARDINALITY:
        return False
    seen: set[int] = set()
    for one, is_repeated in _parts(x):
        if _reshuffles(one) and (is_repeated or id(one) in seen):
            return True
        seen.add(id(one))
    return False


def _parts(dataset: Any, is_repeated: bool = False) -> Iterator[tuple[Any, bool]]:
    """All datasets that one is made of, itself included, and whether an iterator reads each more than once."""
    yield dataset, is_repeated
    kind = private_api.kind_of_dataset(dataset)
    once = kind == "Repeat" and private_api.number_of_dataset(dataset, "_count") == 1
    for one, times in private_api.inputs_and_times(dataset):
        yield from _parts(one, is_repeated or times > 1 or (kind.startswith(_REPEATING) and not once))
    for wrapper in private_api.functions_of_dataset(dataset):
        variants = [outer for outer, _ in private_api.graph_of(wrapper).captures if outer.dtype == tf.variant]
        for one in private_api.datasets_of_variants(variants, wrapper):
            yield from _parts(one, True)


def shuffles(x: Any) -> bool:
    """Whether there is a `shuffle` of the user's in a dataset."""
    return isinstance(x, tf.data.Dataset) and any(_shuffles(one) for one, _ in _parts(x))


def _shuffles(dataset: Any) -> bool:
    return private_api.kind_of_dataset(dataset).startswith("Shuffle")


def _reshuffles(dataset: Any) -> bool:
    """Whether each iterator has another order."""
    if private_api.kind_of_dataset(dataset) == "Random":
        return bool(private_api.number_of_dataset(dataset, "_rerandomize"))
    return _shuffles(dataset) and private_api.number_of_dataset(dataset, "_reshuffle_each_iteration") != 0


def other_order(seeds: list[Any], expected: list[Any]) -> UnsupportedError:
    """Returns the error for data that is shuffled by other seeds than in the backup."""
    return UnsupportedError(
        explain(
            "The data comes in another order than in the run of the backup, so that elements would be seen twice.",
            received=f"a dataset that shuffles by the seeds {seeds}",
            expected=f"the seeds {expected}",
            do="Call keras.utils.set_random_seed with the same number in every run, before the dataset is made; "
            "BackupAndResume(..., same_order=False) accepts another order.",
        )
    )


def other_parts(parts: int, expected: int) -> UnsupportedError:
    """Returns the error for data that the user divided otherwise than in the backup."""
    return UnsupportedError(
        explain(
            "The data is divided in another way than in the run of the backup: every worker brings its own.",
            received=f"{parts} parts",
            expected=f"{expected} parts, as many workers as before",
        )
    )


def other_batches(now: int | None, expected: int | None) -> UnsupportedError:
    """Returns the error for data with another number of batches than in the backup."""
    return UnsupportedError(
        explain(
            "The data is not that of the backup: an epoch has another number of batches.",
            received=f"{now} batches",
            expected=f"{expected} batches, the same data with the same global batch size",
            do="BackupAndResume(..., accept_changes=True) begins the epoch anew with other data.",
        )
    )


def other_executions(done: int, each: int) -> UnsupportedError:
    """Returns the error for a `steps_per_execution` that passes over the step of the backup."""
    return UnsupportedError(
        explain(
            "`steps_per_execution` does not lead to the step of the backup.",
            received=f"steps_per_execution={each}, a backup after {done} steps of an epoch",
            expected="a number that divides it, as in the run before",
        )
    )
