"""Which files, and which elements of them, a worker reads. Plain numbers, no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfdistkit.data.shard_spec import uneven
from tfdistkit.errors import OptionError, explain

# As tf.data says it: all that is there.
TO_THE_END = -1


@dataclass(frozen=True)
class Piece:
    """A run of elements in a file.

    Args:
        path: The file.
        skip: Elements before it.
        take: Its elements; `TO_THE_END` where nobody counted them.
    """

    path: str
    skip: int = 0
    take: int = TO_THE_END


@dataclass(frozen=True)
class Share:
    """What one worker reads.

    Args:
        pieces: In the order in which turns are taken.
        count: Its elements; None where nobody counted them.
        wanted: With how many it is even with the others; `count` if that does not matter.
    """

    pieces: tuple[Piece, ...]
    count: int | None
    wanted: int | None


def can_deal_files(pieces: Sequence[Piece], num_shards: int) -> bool:
    """Whether each worker gets equally many files, which is what `policy="auto"` asks.

    Args:
        pieces: All of the data.
        num_shards: How many workers there are.
    """
    return len(pieces) > 0 and len(pieces) % num_shards == 0


def longest_first(pieces: Sequence[Piece]) -> list[Piece]:
    """Sorts pieces whose elements are counted; others stay as they are.

    Read in turns, each element then has the place that it would have if it was dealt as an element, as long as
    lengths differ by one at most.

    Args:
        pieces: All of the data.
    """
    return sorted(pieces, key=lambda piece: -piece.take)


def count_elements(pieces: Sequence[Piece]) -> int | None:
    """Returns how many elements there are; None if nobody counted them.

    Args:
        pieces: Some of the data.
    """
    if any(piece.take == TO_THE_END for piece in pieces):
        return None
    return sum(piece.take for piece in pieces)


def share_of_files(pieces: Sequence[Piece], num_shards: int, index: int, even_steps: str | None) -> Share:
    """Gives a worker files of its own.

    Where there are fewer files than workers, or where they do not divide them, and where the elements were counted, a
    worker gets a run of elements instead, which may begin and end in the middle of a file.

    Args:
        pieces: All of the data.
        num_shards: How many workers there are.
        index: Which of them this is.
        even_steps: What to do if the shares are not equally large.

    Returns:
        The share.

    Raises:
        OptionError: if there are too few files, or the shares cannot be even and shall.
    """
    total = count_elements(pieces)
    if total is None:
        return Share(_dealt(pieces, num_shards, index, even_steps), None, None)
    if can_deal_files(pieces, num_shards):
        shares = [tuple(pieces[i::num_shards]) for i in range(num_shards)]
    else:
        shares = [_run(pieces, total, num_shards, i) for i in range(num_shards)]
    counts = [count_elements(share) or 0 for share in shares]
    if even_steps == "error" and len(set(counts)) > 1:
        raise uneven(total, num_shards, f"elements in {len(pieces)} files")
    wanted = {"drop": min(counts), "pad": max(counts)}.get(even_steps or "", counts[index])
    return Share(shares[index], counts[index], wanted)


def _dealt(pieces: Sequence[Piece], num_shards: int, index: int, even_steps: str | None) -> tuple[Piece, ...]:
    if even_steps is not None and num_shards > 1:
        raise OptionError(
            explain(
                "Nobody knows how many elements the files hold, so the parts cannot be made even by file.",
                received=f"even_steps={even_steps!r}",
                do='Take policy="element"; or write the files with `tfdistkit data write`, which counts them.',
            )
        )
    if len(pieces) < num_shards:
        raise OptionError(
            explain(
                'There are fewer files than workers (`policy="file"`), and nobody knows how many elements they hold.',
                received=f"{len(pieces)} files, {num_shards} workers",
                do='Take policy="element"; or write more files with `tfdistkit data write --shards`.',
            )
        )
    return tuple(pieces[index::num_shards])


def _run(pieces: Sequence[Piece], total: int, num_shards: int, index: int) -> tuple[Piece, ...]:
    """Cuts the elements of all files into runs that differ by one element at most."""
    each, more = divmod(total, num_shards)
    begin = index * each + min(index, more)
    end = begin + each + (index < more)
    run, position = [], 0
    for piece in pieces:
        first, last = max(begin, position), min(end, position + piece.take)
        if first < last:
            run.append(Piece(piece.path, piece.skip + first - position, last - first))
        position += piece.take
    return tuple(run)
