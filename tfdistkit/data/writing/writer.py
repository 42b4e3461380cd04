"""Writes evenly sharded, counted and verified TFRecord files that appear atomically (`tfdistkit data write`)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdistkit.data.writing.dataset_index import Checksum, WrittenFile, WrittenIndex
from tfdistkit.data.writing.record_files import read_records
from tfdistkit.data.writing.sources import Source
from tfdistkit.data.writing.unfinished import finish, remove_leftovers, unfinished_folder
from tfdistkit.errors import OptionError, explain
from tfdistkit.validation import require_integer

# Interval between progress lines.
_REPORT_EVERY_S = 1.0
# Elements between two reads of the clock.
_CLOCK_EVERY = 64

Report = Callable[[str], None]


def write_shards(source: Source, out: Path, shards: int, report: Report) -> WrittenIndex:
    """Writes the elements of a source round-robin into files that differ by at most one element.

    The files are written beside `out`, read back and compared, and then renamed atomically: `out` is complete, or
    does not exist. Folders that killed runs left beside `out` are removed first. `from_files` interleaves the files,
    so it reads the elements in the order of the source.

    Args:
        source: The elements.
        out: The folder to create.
        shards: The number of files.
        report: Gets progress lines.

    Returns:
        The index of the files.

    Raises:
        OptionError: if `out` exists or is being written, or there are fewer elements than files.
        OSError: if the files read back differ from the source.
    """
    _require_room(source, out, shards)
    out.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(out, report)
    for note in source.notes:
        report(note)
    with unfinished_folder(out) as folder:
        files = _write(source, folder, shards, report)
        index = WrittenIndex(source.name, source.kind, source.columns, files, source.label)
        _require_count(source, index, shards)
        _verify(folder, index, report)
        index.save(folder)
        if source.describe is not None:
            source.describe(folder, index.files)
        finish(folder, out)
    return index


def _write(source: Source, folder: Path, shards: int, report: Report) -> tuple[WrittenFile, ...]:
    names = [source.file_name(number, shards) for number in range(shards)]
    checksums, counts = [Checksum() for _ in names], [0] * shards
    progress = _Progress("written", source.elements, report)
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(tf.io.TFRecordWriter(str(folder / name))) for name in names]
        for position, record in enumerate(source.records()):
            number = position % shards
            writers[number].write(record)
            checksums[number].add(record)
            counts[number] += 1
            progress.add(len(record))
    progress.end()
    sizes = [(folder / name).stat().st_size for name in names]
    rows = zip(names, counts, sizes, checksums)
    return tuple(WrittenFile(name, count, size, checksum.text()) for name, count, size, checksum in rows)


def _verify(folder: Path, index: WrittenIndex, report: Report) -> None:
    """Reads all files back: TensorFlow verifies the checksum of each record, this the checksum of each file."""
    progress = _Progress("verified", index.elements, report)
    for file in index.files:
        checksum, count = Checksum(), 0
        for record in read_records(str(folder / file.name)):
            checksum.add(record)
            count += 1
            progress.add(len(record))
        if (count, checksum.text()) != (file.elements, file.checksum):
            raise OSError(
                explain(
                    "The records written must equal the records read back.",
                    received=f"{count} elements, checksum {checksum.text()} in {file.name}",
                    expected=f"{file.elements} elements, checksum {file.checksum}",
                    do="Check the disk, and that no other process writes there.",
                )
            )
    progress.end()


def _require_room(source: Source, out: Path, shards: int) -> None:
    require_integer("--shards", shards)
    if os.path.lexists(out):
        raise OptionError(
            explain("OUT must not exist yet.", received=str(out), do="Remove it, or name another folder.")
        )
    if source.elements is not None:
        _require_elements(source, source.elements, shards)


def _require_elements(source: Source, elements: int, shards: int) -> None:
    if elements < shards:
        raise OptionError(
            explain(
                "There must be at least one element per file.",
                received=f"{elements} elements in {source.name}, --shards {shards}",
                do=f"Pass --shards {elements} or less." if elements else "Name a source with elements.",
            )
        )


def _require_count(source: Source, index: WrittenIndex, shards: int) -> None:
    _require_elements(source, index.elements, shards)
    if source.elements not in (None, index.elements):
        raise OSError(
            explain(
                f"The source must hold {source.elements} elements, as in its metadata.",
                received=f"{index.elements} elements",
                do="Check that no other process changes the source.",
            )
        )


class _Progress:
    """Reports progress about once a second."""

    def __init__(self, done: str, elements: int | None, report: Report):
        self._done, self._elements, self._report = done, elements, report
        self._count = self._bytes = 0
        self._started = self._reported = time.monotonic()

    def add(self, size_bytes: int) -> None:
        """Counts an element."""
        self._count += 1
        self._bytes += size_bytes
        if self._count % _CLOCK_EVERY == 0 and time.monotonic() - self._reported > _REPORT_EVERY_S:
            self._reported = time.monotonic()
            self.end()

    def end(self) -> None:
        """Reports now."""
        of: Any = "" if self._elements is None else f" of {self._elements}"
        seconds = time.monotonic() - self._started
        self._report(f"{self._done} {self._count}{of} elements, {self._bytes / 1e6:.1f} MB, {seconds:.0f} s")
