"""Coverage: how often all ranks together see each element of a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.collectives import all_gather
from tfdistkit.data.batch_rows import rows_of_batches
from tfdistkit.data.dataset_metadata import PADDED, SHARDED, has_mark
from tfdistkit.data.padding import is_padding, require_weights_kept
from tfdistkit.data.shard_spec import find_shard
from tfdistkit.errors import OptionError, explain


@dataclass(frozen=True)
class Coverage:
    """The result of `coverage`.

    Args:
        times: Maps a repeat count to the number of elements seen that often.
        elements_per_rank: The elements that each rank saw, without padding.
        batches_per_rank: The dataset elements that each rank read: batches if the dataset is batched.
        padding: Rows of padding, on all ranks.
    """

    times: dict[int, int]
    elements_per_rank: tuple[int, ...]
    batches_per_rank: tuple[int, ...]
    padding: int

    @property
    def distinct(self) -> int:
        """The number of distinct elements that were seen."""
        return sum(self.times.values())

    @property
    def is_exactly_once(self) -> bool:
        """Whether each element was seen at most once."""
        return set(self.times) <= {1}

    def __str__(self) -> str:
        often = ", ".join(f"{count} x{times}" for times, count in sorted(self.times.items()))
        ranks = ", ".join(map(str, self.elements_per_rank))
        padding = f", {self.padding} rows of padding" if self.padding else ""
        return f"{self.distinct} different elements, seen: {often or 'none'}; by rank: {ranks}{padding}"


def coverage(
    dataset: tf.data.Dataset, *, batched: bool | None = None, key: Callable[[Any], Any] | None = None
) -> Coverage:
    """Counts how often the ranks together see each element of a dataset in one epoch.

    All ranks call it. Each rank reads once what `fit` would give it: its shard if the dataset was sharded, else its
    rows of every batch. Lost elements are missing in `distinct`, repeated ones show in `times`. It takes about 40
    bytes of memory for each element.

    Args:
        dataset: The dataset that `fit` gets.
        batched: Whether its elements are batches whose rows are counted. Default: whether all of its tensors have a
            first dimension that is equal or unknown.
        key: `key(element) -> number, string or array` identifies an element; with batches it gets a row. Default: the
            whole element, so equal rows count as one element that is seen twice.

    Returns:
        A `Coverage`, the same on every rank; printed, it is a line of text.

    Raises:
        OptionError: (a ValueError) if `dataset` is not a finite `tf.data.Dataset`.
        UnsupportedError: (a RuntimeError) if there are several ranks and no strategy yet.

    Example:
        ```python
        print(tfdistkit.data.coverage(train.batch(64)))
        # 60000 different elements, seen: 60000 x1; by rank: 30000, 30000
        ```
    """
    _check_finite(dataset)
    batched = looks_batched(dataset.element_spec) if batched is None else batched
    parts, index = find_shard(None, None)
    if batched and parts > 1 and not has_mark(dataset, SHARDED):
        dataset = rows_of_batches(dataset, parts, index, None)
    hashes, padding, batches = count_own(dataset, batched, key)
    counts = np.array([len(hashes), batches, padding], np.int64)
    if parts > 1:
        of_all_ranks: Any = np.reshape(all_gather(tf.constant(counts)).numpy(), [-1, 3])
        hashes = all_gather(tf.constant(hashes)).numpy()
    else:
        of_all_ranks = counts[None]
    return summarize(hashes, of_all_ranks)


def summarize(hashes: np.ndarray, counts: np.ndarray) -> Coverage:
    """Builds a `Coverage` from the counts of all ranks.

    Args:
        hashes: A hash of each element that was seen, of all ranks.
        counts: One row per rank: its elements, batches, and rows of padding.
    """
    often, count = np.unique(np.unique(hashes, return_counts=True)[1], return_counts=True)
    times = dict(zip(often.tolist(), count.tolist()))
    return Coverage(times, tuple(counts[:, 0].tolist()), tuple(counts[:, 1].tolist()), int(counts[:, 2].sum()))


def count_own(dataset: tf.data.Dataset, batched: bool, key: Callable[[Any], Any] | None) -> tuple[np.ndarray, int, int]:
    """Reads this rank's dataset once, and hashes its elements.

    Args:
        dataset: The dataset.
        batched: Whether its elements are batches.
        key: As for `coverage`.

    Returns:
        A hash of each element, the rows of padding, the dataset elements.
    """
    is_padded = has_mark(dataset, PADDED)
    if is_padded:
        require_weights_kept(dataset.element_spec)
    hashes: list[int] = []
    padding = batches = 0
    for element in dataset:
        batches += 1
        rows = _rows(element) if batched else [element]
        padded = _padded(element, batched) if is_padded else np.zeros(len(rows), bool)
        padding += int(padded.sum())
        hashes += [_hash(row if key is None else key(row)) for row, pads in zip(rows, padded) if not pads]
    return np.array(hashes, np.int64), padding, batches


def looks_batched(element_spec: Any) -> bool:
    """Guesses whether elements are batches: all tensors have the same or an unknown first dimension.

    Args:
        element_spec: The `element_spec` of the dataset.
    """
    shapes = [spec.shape for spec in tf.nest.flatten(element_spec)]
    return all(shape.rank for shape in shapes) and len({shape[0] for shape in shapes}) == 1


def _padded(element: Any, batched: bool) -> np.ndarray:
    weights = element[2]
    if not batched:
        weights = tf.nest.map_structure(lambda weight: weight[None], weights)
    return np.asarray(is_padding(weights).numpy())


def _rows(batch: Any) -> list[Any]:
    flat = tf.nest.flatten(batch)
    dense = [tf.sparse.to_dense(v) if isinstance(v, tf.SparseTensor) else v for v in flat]
    counts = [int(v.nrows() if isinstance(v, tf.RaggedTensor) else v.shape[0]) for v in dense if v.shape.rank]
    each = [[v[i] if v.shape.rank else v for v in dense] for i in range(counts[0])]
    return [tf.nest.pack_sequence_as(batch, row) for row in each]


def _hash(value: Any) -> int:
    """Returns a 64-bit hash of a value: a million distinct values collide with a probability of 1 in 40 million."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in tf.nest.flatten(value, expand_composites=True):
        array = np.asarray(leaf)
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def _check_finite(dataset: Any) -> None:
    if not isinstance(dataset, tf.data.Dataset) or int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise OptionError(
            explain(
                "`dataset` must be a finite tf.data.Dataset.",
                received=f"an object of {type(dataset)}",
                do="Call `coverage` before `repeat()`.",
            )
        )
