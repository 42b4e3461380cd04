"""Interleaves files, one element of each at a time, in an order that does not depend on the number of workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import ONE_ORDER, even_marks, marked, seed_mark
from tfdistkit.data.element_sharding import padded, shard_elements, with_weights
from tfdistkit.data.loading.file_shards import (
    TO_THE_END,
    Piece,
    count_elements,
    divides_files,
    longest_first,
    share_of_files,
)
from tfdistkit.data.rank_agreement import agreed
from tfdistkit.data.shard_spec import find_shard, require_even_steps
from tfdistkit.data.shuffle_order import agree_on_seed, epoch_seeds, permutation, shuffled
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_choice, require_integer

POLICIES = ("auto", "file", "element", "seed", "off")
# Each file has its own reader and buffer, all open at once.
_MOST_FILES = 1024

Reader = Callable[[Any], tf.data.Dataset]


@dataclass(frozen=True)
class Request:
    """The user's options for data in files; see `from_files`.

    Args:
        shuffle: Whether to shuffle.
        seed: The seed of the shuffle order; None lets rank 0 choose one.
        buffer_size: Elements in the shuffle buffers of all files together.
        policy: The unit that is sharded.
        even_steps: How to handle a remainder.
        num_shards: The number of shards; None for the world size.
        index: The shard; None for the rank.
    """

    shuffle: bool
    seed: int | None
    buffer_size: int
    policy: str
    even_steps: str | None
    num_shards: int | None
    index: int | None


def interleave_files(pieces: Sequence[Piece], reader: Reader, request: Request) -> tf.data.Dataset:
    """Creates a dataset of this worker's shard of some files.

    Args:
        pieces: All of the data.
        reader: Creates a dataset of the elements of a file from its path (a scalar string tensor).
        request: The user's options.

    Returns:
        The dataset of elements, marked as sharded.

    Raises:
        OptionError: if an option is invalid, or the files cannot be sharded by it.
        UnsupportedError: on all ranks, if their files or arguments differ.
    """
    require_choice("policy", request.policy, POLICIES, do='For "batch", batch a tf.data.Dataset and call `shard`.')
    require_even_steps(request.even_steps)
    buffer_size = require_integer("buffer_size", request.buffer_size)
    parts, index = find_shard(request.num_shards, request.index)
    _require_some(pieces)
    if request.num_shards is None and request.policy not in ("seed", "off"):
        _compare(pieces, parts, request)
    pieces = longest_first(pieces)
    shuffle = request.shuffle or request.policy == "seed"
    seed = agree_on_seed(request.seed, parts, request.num_shards is not None) if shuffle else None
    stream = index if request.policy == "seed" else 0
    interleaver = _Interleaver(reader, max(1, buffer_size // len(pieces)), seed, stream)
    policy = request.policy
    if policy == "auto":
        policy = "file" if divides_files(pieces, parts) else "element"
    order = seed_mark(request.seed, seed)
    if policy == "file" and parts > 1:
        own = _own_files(interleaver, pieces, parts, index, request.even_steps)
        order += [ONE_ORDER] * divides_files(pieces, parts)
        return marked(own, *order, *even_marks(request.even_steps, parts))
    dataset = _counted(interleaver.read(pieces), count_elements(pieces))
    if policy in ("seed", "off"):
        return marked(dataset, *order)
    own = shard_elements(dataset, parts, index, request.even_steps)
    return marked(own, ONE_ORDER, *order, *even_marks(request.even_steps, parts))


def _compare(pieces: Sequence[Piece], parts: int, request: Request) -> None:
    """Compares the files and options of all ranks; the folders of the files may differ between hosts."""
    arguments = {"shuffle": request.shuffle, "seed": request.seed, "buffer_size": request.buffer_size,
                 "policy": request.policy, "even_steps": request.even_steps}  # fmt: skip
    files = [f"{os.path.basename(piece.path)} from element {piece.skip}, {_length(piece.take)}" for piece in pieces]
    agreed(None, parts, "tfdistkit.data.from_files", arguments=list(arguments.items()), files=files)


def _length(take: int) -> str:
    return "all elements" if take == TO_THE_END else f"{take} elements"


def _own_files(
    interleaver: _Interleaver, pieces: Sequence[Piece], parts: int, index: int, even_steps: str | None
) -> tf.data.Dataset:
    share = share_of_files(pieces, parts, index, even_steps)
    if divides_files(pieces, parts):
        dataset = interleaver.read(pieces, parts, index)
    else:
        dataset = interleaver.read(share.pieces)
    dataset = _counted(dataset, share.count)
    if even_steps == "pad":
        dataset = with_weights(dataset)
        missing = share.wanted - share.count  # type: ignore[operator]  # they were counted
        # A worker without elements copies its padding from the files of its peers.
        dataset = padded(dataset, missing) if share.count else _all_padding(interleaver, pieces, missing)
    elif even_steps == "drop":
        dataset = dataset.take(share.wanted)
    return dataset


def _all_padding(interleaver: _Interleaver, pieces: Sequence[Piece], missing: int) -> tf.data.Dataset:
    dataset = with_weights(interleaver.read(pieces)).take(1)
    return padded(dataset, missing).skip(1)


class _Interleaver:
    """Interleaves ranges of files, one element of each at a time.

    Args:
        reader: Creates a dataset from a path.
        buffer_size: Elements in the shuffle buffer of each file.
        seed: The seed of the shuffle order; None keeps the order of the files.
        stream: Different streams give different orders.
    """

    def __init__(self, reader: Reader, buffer_size: int, seed: int | None, stream: int):
        self._reader, self._buffer_size, self._seed, self._stream = reader, buffer_size, seed, stream

    def read(self, pieces: Sequence[Piece], parts: int = 1, index: int = 0) -> tf.data.Dataset:
        """Returns the elements of every `parts`-th range, beginning with number `index` of each epoch's order."""
        paths = tf.constant([piece.path for piece in pieces], tf.string)
        skips = tf.constant([piece.skip for piece in pieces], tf.int64)
        takes = tf.constant([piece.take for piece in pieces], tf.int64)

        def interleaved(order: Any, epoch_seed: Any) -> tf.data.Dataset:
            def elements(number: Any) -> tf.data.Dataset:
                one = self._reader(paths[number]).skip(skips[number]).take(takes[number])
                if epoch_seed is None:
                    return one
                # The stream is the file's number, so its order is the same on every rank.
                return shuffled(one, self._buffer_size, epoch_seed, stream=number, every_epoch_anew=False)

            own = tf.data.Dataset.from_tensor_slices(order[index::parts])
            return own.interleave(elements, cycle_length=max(1, -(-len(pieces) // parts)), block_length=1)

        if self._seed is None:
            return interleaved(tf.range(len(pieces), dtype=tf.int64), None)
        epochs = epoch_seeds(self._seed, self._stream)
        return epochs.flat_map(lambda seed: interleaved(_files_in_order(takes, len(pieces), seed), seed))


def _files_in_order(takes: tf.Tensor, count: int, seed: Any) -> tf.Tensor:
    """Shuffles files, the longest ones still first (`longest_first`)."""
    order = permutation(count, seed)
    return tf.cast(tf.gather(order, tf.argsort(-tf.gather(takes, order), stable=True)), tf.int64)


def _counted(dataset: tf.data.Dataset, count: int | None) -> tf.data.Dataset:
    """Sets the cardinality; reading fails if a file holds another number of elements."""
    return dataset if count is None else dataset.apply(tf.data.experimental.assert_cardinality(count))


def _require_some(pieces: Sequence[Piece]) -> None:
    if not 0 < len(pieces) <= _MOST_FILES:
        raise OptionError(
            explain(
                f"The number of files must be from 1 to {_MOST_FILES}: all of them are open at once.",
                received=f"{len(pieces)} files",
                do="Write the data into fewer files with `tfdistkit data write --shards`." if pieces else None,
            )
        )
