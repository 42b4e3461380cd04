"""Files read in turns: one element of each, again and again, in an order that does not depend on who reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdistkit.data.dataset_metadata import ONE_ORDER, PADDED, marked, seed_mark
from tfdistkit.data.element_sharding import deal, padded, with_weights
from tfdistkit.data.loading.file_shards import (
    TO_THE_END,
    Piece,
    can_deal_files,
    count_elements,
    longest_first,
    share_of_files,
)
from tfdistkit.data.rank_agreement import agreed
from tfdistkit.data.shard_spec import find_place, require_choice, require_even_steps
from tfdistkit.data.sharding import require_buffer
from tfdistkit.data.shuffle_order import agree_on_seed, epoch_seeds, permutation, shuffled
from tfdistkit.errors import OptionError, explain

POLICIES = ("auto", "file", "element", "seed", "off")
# Each file has a reader and a buffer of its own, all of them open at once.
_MOST_FILES = 1024

Reader = Callable[[Any], tf.data.Dataset]


@dataclass(frozen=True)
class Request:
    """What the user asks of a data set in files; see `from_files`.

    Args:
        shuffle: Whether to shuffle.
        seed: The seed of the order; None lets rank 0 choose one.
        buffer_size: Elements that are held in memory to choose from, those of all files together.
        policy: What a part is.
        even_steps: What to do about a remainder.
        num_shards: The number of parts; None for the world size.
        index: The part; None for the rank.
    """

    shuffle: bool
    seed: int | None
    buffer_size: int
    policy: str
    even_steps: str | None
    num_shards: int | None
    index: int | None


def read_in_turns(pieces: Sequence[Piece], reader: Reader, request: Request) -> tf.data.Dataset:
    """Makes a dataset of this worker's part of some files.

    Args:
        pieces: All of the data.
        reader: Makes a dataset of the elements of a file, from its path (a scalar string tensor).
        request: What the user asks for.

    Returns:
        The dataset of elements, marked.

    Raises:
        OptionError: if something that the user asks for cannot be.
        UnsupportedError: on all ranks, if they bring other files or arguments.
    """
    require_choice("policy", request.policy, POLICIES, do="For `batch`, batch elements of `tf.data` and call `shard`.")
    require_even_steps(request.even_steps)
    buffer_size = require_buffer(request.buffer_size)
    parts, index = find_place(request.num_shards, request.index)
    _require_some(pieces)
    if request.num_shards is None and request.policy not in ("seed", "off"):
        _compare(pieces, parts, request)
    pieces = longest_first(pieces)
    shuffle = request.shuffle or request.policy == "seed"
    seed = agree_on_seed(request.seed, parts, request.num_shards is not None) if shuffle else None
    turns = _Turns(reader, max(1, buffer_size // len(pieces)), seed, index if request.policy == "seed" else 0)
    policy = request.policy
    if policy == "auto":
        policy = "file" if can_deal_files(pieces, parts) else "element"
    order = seed_mark(request.seed, seed)
    if policy == "file" and parts > 1:
        own = _own_files(turns, pieces, parts, index, request.even_steps)
        order += [ONE_ORDER] * can_deal_files(pieces, parts)
        return marked(own, *order, *_pad_mark(request.even_steps, parts))
    dataset = _counted(turns.read(pieces), count_elements(pieces))
    if policy in ("seed", "off"):
        return marked(dataset, *order)
    own = deal(dataset, parts, index, request.even_steps)
    return marked(own, ONE_ORDER, *order, *_pad_mark(request.even_steps, parts))


def _compare(pieces: Sequence[Piece], parts: int, request: Request) -> None:
    """Lets the ranks compare what they read; the same files may lie in other folders on other hosts."""
    arguments = {"shuffle": request.shuffle, "seed": request.seed, "buffer_size": request.buffer_size,
                 "policy": request.policy, "even_steps": request.even_steps}  # fmt: skip
    files = [f"{os.path.basename(piece.path)} from element {piece.skip}, {_told(piece.take)}" for piece in pieces]
    agreed(None, parts, "tfdistkit.data.from_files", arguments=list(arguments.items()), files=files)


def _told(take: int) -> str:
    return "all of them" if take == TO_THE_END else f"{take} of them"


def _own_files(
    turns: _Turns, pieces: Sequence[Piece], parts: int, index: int, even_steps: str | None
) -> tf.data.Dataset:
    share = share_of_files(pieces, parts, index, even_steps)
    if can_deal_files(pieces, parts):
        dataset = turns.read(pieces, parts, index)
    else:
        dataset = turns.read(share.pieces)
    dataset = _counted(dataset, share.count)
    if even_steps == "pad":
        dataset = with_weights(dataset)
        missing = share.wanted - share.count  # type: ignore[operator]  # they were counted
        # A worker without elements takes what it pads with from the others' files.
        dataset = padded(dataset, missing) if share.count else _all_padding(turns, pieces, missing)
    elif even_steps == "drop":
        dataset = dataset.take(share.wanted)
    return dataset


def _all_padding(turns: _Turns, pieces: Sequence[Piece], missing: int) -> tf.data.Dataset:
    dataset = with_weights(turns.read(pieces)).take(1)
    return padded(dataset, missing).skip(1)


class _Turns:
    """Reads pieces in turns.

    Args:
        reader: Makes a dataset of a path.
        buffer_size: Elements of each file that are held in memory to choose from.
        seed: Of the order; None keeps that of the files.
        stream: Different streams give different orders.
    """

    def __init__(self, reader: Reader, buffer_size: int, seed: int | None, stream: int):
        self._reader, self._buffer_size, self._seed, self._stream = reader, buffer_size, seed, stream

    def read(self, pieces: Sequence[Piece], parts: int = 1, index: int = 0) -> tf.data.Dataset:
        """Returns the elements of every `parts`-th piece, beginning with number `index` of each epoch's order."""
        paths = tf.constant([piece.path for piece in pieces], tf.string)
        skips = tf.constant([piece.skip for piece in pieces], tf.int64)
        takes = tf.constant([piece.take for piece in pieces], tf.int64)

        def in_turns(order: Any, epoch_seed: Any) -> tf.data.Dataset:
            def elements(number: Any) -> tf.data.Dataset:
                one = self._reader(paths[number]).skip(skips[number]).take(takes[number])
                if epoch_seed is None:
                    return one
                # Of the file's number: whoever reads it, its elements come in the same order.
                return shuffled(one, self._buffer_size, epoch_seed, stream=number, every_epoch_anew=False)

            own = tf.data.Dataset.from_tensor_slices(order[index::parts])
            return own.interleave(elements, cycle_length=max(1, -(-len(pieces) // parts)), block_length=1)

        if self._seed is None:
            return in_turns(tf.range(len(pieces), dtype=tf.int64), None)
        epochs = epoch_seeds(self._seed, self._stream)
        return epochs.flat_map(lambda seed: in_turns(_files_in_order(takes, len(pieces), seed), seed))


def _files_in_order(takes: tf.Tensor, count: int, seed: Any) -> tf.Tensor:
    """Shuffles files, the longest ones still first (`longest_first`)."""
    order = permutation(count, seed)
    return tf.cast(tf.gather(order, tf.argsort(-tf.gather(takes, order), stable=True)), tf.int64)


def _counted(dataset: tf.data.Dataset, count: int | None) -> tf.data.Dataset:
    """Tells how many elements there are; a file that has fewer than it should is an error when it is read."""
    return dataset if count is None else dataset.apply(tf.data.experimental.assert_cardinality(count))


def _pad_mark(even_steps: str | None, parts: int) -> list[str]:
    return [PADDED] if even_steps == "pad" and parts > 1 else []


def _require_some(pieces: Sequence[Piece]) -> None:
    if not 0 < len(pieces) <= _MOST_FILES:
        raise OptionError(
            explain(
                "There are too many files to read all of them in turns." if pieces else "There are no files.",
                received=f"{len(pieces)} files",
                expected=f"1 to {_MOST_FILES}",
                do="Write the data into fewer files with `tfdistkit data write --shards`." if pieces else None,
            )
        )
