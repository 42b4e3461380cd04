"""Assigns files, and ranges of their elements, to workers. Plain numbers, no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdistkit.data.shard_spec import uneven
from tfdistkit.errors import OptionError, explain

# As in `Dataset.take`: all remaining elements.
TO_THE_END = -1


@dataclass(frozen=True)
class Piece:
    """A range of elements in a file.

    Args:
        path: The file.
        skip: Elements before the range.
        take: Elements in the range; `TO_THE_END` if their number is unknown.
    """

    path: str
    skip: int = 0
    take: int = TO_THE_END


@dataclass(frozen=True)
class Share:
    """The shard of one worker.

    Args:
        pieces: Its ranges, in the order in which they are interleaved.
        count: Its elements; None if their number is unknown.
        wanted: Its elements after `even_steps` drops or pads; `count` without `even_steps`.
    """

    pieces: tuple[Piece, ...]
    count: int | None
    wanted: int | None


def divides_files(pieces: Sequence[Piece], num_shards: int) -> bool:
    """Returns whether each worker gets the same number of files, as `policy="auto"` asks.

    Args:
        pieces: All of the data.
        num_shards: The number of workers.
    """
    return len(pieces) > 0 and len(pieces) % num_shards == 0


def longest_first(pieces: Sequence[Piece]) -> list[Piece]:
    """Sorts ranges of known length, the longest first; ranges of unknown length stay in order.

    Interleaved, each element then has the position that sharding by element gives it, if lengths differ by at most
    one.

    Args:
        pieces: All of the data.
    """
    return sorted(pieces, key=lambda piece: -piece.take)


def count_elements(pieces: Sequence[Piece]) -> int | None:
    """Returns the number of elements; None if it is unknown.

    Args:
        pieces: Some of the data.
    """
    if any(piece.take == TO_THE_END for piece in pieces):
        return None
    return sum(piece.take for piece in pieces)


def share_of_files(pieces: Sequence[Piece], num_shards: int, index: int, even_steps: str | None) -> Share:
    """Assigns whole files to a worker.

    If the files do not divide evenly among the workers, and the elements are counted, a worker gets a range of
    elements instead, which may begin and end in the middle of a file.

    Args:
        pieces: All of the data.
        num_shards: The number of workers.
        index: This worker.
        even_steps: How to handle shards of different sizes.

    Returns:
        The shard of the worker.

    Raises:
        OptionError: if there are too few files, or the shards are uneven with `"error"`.
    """
    total = count_elements(pieces)
    if total is None:
        return Share(_whole_files(pieces, num_shards, index, even_steps), None, None)
    if divides_files(pieces, num_shards):
        shares = [tuple(pieces[i::num_shards]) for i in range(num_shards)]
    else:
        shares = [_element_range(pieces, total, num_shards, i) for i in range(num_shards)]
    counts = [count_elements(share) or 0 for share in shares]
    if even_steps == "error" and len(set(counts)) > 1:
        raise uneven(total, num_shards, f"elements in {len(pieces)} files")
    wanted = {"drop": min(counts), "pad": max(counts)}.get(even_steps or "", counts[index])
    return Share(shares[index], counts[index], wanted)


def _whole_files(pieces: Sequence[Piece], num_shards: int, index: int, even_steps: str | None) -> tuple[Piece, ...]:
    if even_steps is not None and num_shards > 1:
        raise OptionError(
            explain(
                '`even_steps` must be None with policy="file": the number of elements in each file is unknown.',
                received=f"even_steps={even_steps!r}",
                do='Pass policy="element"; or write the files with `tfdistkit data write`, which counts the elements.',
            )
        )
    if len(pieces) < num_shards:
        raise OptionError(
            explain(
                'There must be at least one file per worker with policy="file", unless the elements are counted.',
                received=f"{len(pieces)} files, {num_shards} workers",
                do='Pass policy="element"; or write more files with `tfdistkit data write --shards`.',
            )
        )
    return tuple(pieces[index::num_shards])


def _element_range(pieces: Sequence[Piece], total: int, num_shards: int, index: int) -> tuple[Piece, ...]:
    """Splits the elements of all files into ranges that differ by at most one element."""
    each, more = divmod(total, num_shards)
    begin = index * each + min(index, more)
    end = begin + each + (index < more)
    own, position = [], 0
    for piece in pieces:
        first, last = max(begin, position), min(end, position + piece.take)
        if first < last:
            own.append(Piece(piece.path, piece.skip + first - position, last - first))
        position += piece.take
    return tuple(own)
