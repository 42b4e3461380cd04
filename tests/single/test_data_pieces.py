"""Assignment of files and ranges of elements to workers, as plain numbers, with generated cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdistkit.data.loading.file_shards import (
    TO_THE_END,
    Piece,
    count_elements,
    divides_files,
    longest_first,
    share_of_files,
)
from tfdistkit.errors import OptionError

pytestmark = pytest.mark.tensorflow  # The package `data` loads it.

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=9)
WORKERS = st.integers(1, 7)
many = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def pieces_of(lengths: list[int], skips: int = 0) -> list[Piece]:
    return [Piece(f"file{i}", skips, length) for i, length in enumerate(lengths)]


def elements(pieces: tuple[Piece, ...]) -> list[tuple[str, int]]:
    return [(piece.path, piece.skip + i) for piece in pieces for i in range(piece.take)]


@many
@given(lengths=LENGTHS, workers=WORKERS, skip=st.integers(0, 3))
def test_counted_elements_are_divided_each_once(lengths: list[int], workers: int, skip: int) -> None:
    pieces = pieces_of(lengths, skip)
    shares = [share_of_files(pieces, workers, i, None) for i in range(workers)]
    parts = [elements(share.pieces) for share in shares]
    assert sorted(sum(parts, [])) == elements(tuple(pieces))
    assert [share.count for share in shares] == [share.wanted for share in shares] == list(map(len, parts))
    if divides_files(pieces, workers):
        assert all(piece in pieces for share in shares for piece in share.pieces)
    else:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@many
@given(lengths=LENGTHS, workers=WORKERS)
def test_even_steps_give_equal_counts(lengths: list[int], workers: int) -> None:
    pieces = pieces_of(lengths)
    counts = [share_of_files(pieces, workers, i, None).count for i in range(workers)]
    assert {share_of_files(pieces, workers, i, "drop").wanted for i in range(workers)} == {min(counts)}
    assert {share_of_files(pieces, workers, i, "pad").wanted for i in range(workers)} == {max(counts)}
    if len(set(counts)) == 1:
        assert share_of_files(pieces, workers, 0, "error").count == counts[0]
    else:
        with pytest.raises(OptionError, match="must be a multiple of the number of workers"):
            share_of_files(pieces, workers, 0, "error")


@many
@given(files=st.integers(1, 9), workers=WORKERS)
def test_uncounted_files_are_assigned_whole(files: int, workers: int) -> None:
    pieces = pieces_of([TO_THE_END] * files)
    assert count_elements(pieces) is None
    if files < workers:
        with pytest.raises(OptionError, match="at least one file per worker"):
            share_of_files(pieces, workers, 0, None)
        return
    parts = [share_of_files(pieces, workers, i, None).pieces for i in range(workers)]
    assert sorted((p for part in parts for p in part), key=lambda p: p.path) == pieces
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if workers > 1:
        with pytest.raises(OptionError, match="`even_steps` must be None"):
            share_of_files(pieces, workers, 0, "drop")


def test_longest_first_is_stable() -> None:
    assert [p.path for p in longest_first(pieces_of([2, 3, 2, 3]))] == ["file1", "file3", "file0", "file2"]
    assert longest_first(pieces_of([TO_THE_END] * 3)) == pieces_of([TO_THE_END] * 3)
