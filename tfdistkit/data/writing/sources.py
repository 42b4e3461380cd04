"""The sources of `tfdistkit data write`: arrays, CSV, TFRecords and tensorflow-datasets, all read as records."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdistkit.data.loading.datasets_of_tfds import find_builder, pieces_of_split
from tfdistkit.data.loading.file_shards import TO_THE_END, Piece, count_elements
from tfdistkit.data.writing.array_files import Columns, Table, read_arrays
from tfdistkit.data.writing.csv_files import CsvOptions, read_csv
from tfdistkit.data.writing.dataset_index import INDEX, WrittenFile, load_index, serialize_row, tfds_package
from tfdistkit.data.writing.record_files import read_in_order, read_interleaved, read_records
from tfdistkit.data.writing.unfinished import require_finished
from tfdistkit.errors import OptionError, explain, nearest

_ARRAYS = (".npz", ".npy")
_CSV = (".csv", ".tsv")
_PLAIN_CSV = CsvOptions()
_TFDS = "tfds:"
_TFDS_INFO = "dataset_info.json"
_TFRECORDS = "*.tfrecord*"
# name/config:version
_TFDS_NAME = re.compile(r"[a-z]\w*(/[\w.+-]+)?(:[\d.*]+)?")


@dataclass(frozen=True)
class Source:
    """Records to write.

    Args:
        name: The source, as text for the user.
        kind: The content of a record; see `WrittenIndex`.
        columns: For arrays; see `WrittenIndex`.
        elements: The number of records; None if unknown.
        records: Reads the records, in order.
        file_name: Names a file, from its number and the number of files.
        describe: Writes metadata beside the files, from their folder and the files; None for none.
        label: See `WrittenIndex`.
        notes: Notes for the user, one line each.
    """

    name: str
    kind: str
    columns: Columns
    elements: int | None
    records: Callable[[], Iterator[bytes]]
    file_name: Callable[[int, int], str] = lambda number, count: f"data-{number:05d}-of-{count:05d}.tfrecord"
    describe: Callable[[Path, Sequence[WrittenFile]], None] | None = None
    label: str | None = None
    notes: tuple[str, ...] = ()


def open_source(
    text: str, split: str, data_dir: str | None, csv: CsvOptions = _PLAIN_CSV, label: str | None = None
) -> Source:
    """Opens the source that the argument SOURCE names.

    Args:
        text: A `.npz`, `.npy`, `.csv` or `.tsv` file; a TFRecord file or a folder of them; a folder that
            `tfdistkit data write` wrote; a pattern of any of these, all of one kind; a prepared folder or a name of
            tensorflow-datasets (`tfds:name` if a file has the same name).
        split: The split of a data set of tensorflow-datasets.
        data_dir: The data folder of tensorflow-datasets.
        csv: How to read CSV files.
        label: The label column.

    Raises:
        OptionError: if it does not exist, or cannot be read.
        MissingDependencyError: if it needs tensorflow-datasets, which is not installed.
    """
    source = _open(text, split, data_dir, csv)
    return source if label is None else _labelled(source, label)


def _open(text: str, split: str, data_dir: str | None, csv: CsvOptions) -> Source:
    if text.startswith(_TFDS):
        return _tfds(find_builder(text.removeprefix(_TFDS), data_dir), split)
    if tf.io.gfile.exists(os.path.join(text, _TFDS_INFO)):
        require_finished([text])
        return _tfds(find_builder(text), split)
    paths = [text] if tf.io.gfile.exists(text) else _matches(text)
    if paths:
        return _joined(text, [_open_path(path, csv) for path in paths])
    if not _TFDS_NAME.fullmatch(text):
        raise _not_found(text)
    return _tfds(find_builder(text, data_dir), split)


def _matches(pattern: str) -> list[str]:
    """Expands a pattern as a shell does: hidden files do not match."""
    hidden = os.path.basename(pattern).startswith(".")
    found = sorted(tf.io.gfile.glob(pattern))
    return [path for path in found if hidden or not os.path.basename(path.rstrip("/")).startswith(".")]


def _open_path(path: str, csv: CsvOptions) -> Source:
    if tf.io.gfile.isdir(path):
        return _open_folder(path)
    if path.lower().endswith(_ARRAYS):
        return _of_table(path, read_arrays(path))
    if path.lower().endswith(_CSV):
        return _of_table(path, read_csv(path, csv))
    return Source(path, "records", (), None, lambda: read_records(path))


def _open_folder(folder: str) -> Source:
    require_finished([folder])
    if tf.io.gfile.exists(os.path.join(folder, _TFDS_INFO)):
        raise OptionError(
            explain(
                "A pattern must not match a data set of tensorflow-datasets: it cannot be joined with others.",
                received=folder,
                do="Write one data set at a time: name its folder, without a pattern.",
            )
        )
    if tf.io.gfile.exists(os.path.join(folder, INDEX)):
        return _written(folder)
    paths = [path for path in _matches(os.path.join(folder, _TFRECORDS)) if not tf.io.gfile.isdir(path)]
    if not paths:
        raise OptionError(
            explain(
                f"The folder must hold files {_TFRECORDS}, or be written by `tfdistkit data write`.",
                received=folder,
                do=f"Name other files by a pattern: '{folder.rstrip('/')}/*.npz' or '{folder.rstrip('/')}/*.csv'.",
            )
        )
    return Source(folder, "records", (), None, lambda: read_in_order(paths))


def _written(folder: str) -> Source:
    index = load_index(folder)
    paths = [piece.path for piece in index.pieces(folder)]
    for path, file in zip(paths, index.files):
        size = tf.io.gfile.stat(path).length if tf.io.gfile.exists(path) else None
        if size != file.size_bytes:
            raise OptionError(
                explain(
                    "Each file must match the index of its folder: this one was lost, truncated or replaced.",
                    received=f"{path}: " + ("missing" if size is None else f"{size} bytes"),
                    expected=f"{file.size_bytes} bytes",
                    do="Copy or write the folder again.",
                )
            )
    counts = [file.elements for file in index.files]

    def records() -> Iterator[bytes]:
        return read_interleaved(paths, counts)

    return Source(folder, index.kind, index.columns, index.elements, records, label=index.label)


def _of_table(path: str, table: Table) -> Source:
    def records() -> Iterator[bytes]:
        return (serialize_row(row) for row in table.rows())

    return Source(path, "arrays", table.columns, table.count, records, notes=table.notes)


def _joined(text: str, parts: Sequence[Source]) -> Source:
    """Concatenates sources."""
    first = parts[0]
    for part in parts[1:]:
        if _schema(part) != _schema(first):
            raise OptionError(
                explain(
                    "All files of SOURCE must hold the same names, dtypes and shapes.",
                    received=f"{_content(first)} in {first.name}, {_content(part)} in {part.name}",
                    do="Write them one by one, or use a pattern that matches fewer files.",
                )
            )
    elements = [part.elements for part in parts if part.elements is not None]
    return replace(
        first,
        name=text,
        elements=sum(elements) if len(elements) == len(parts) else None,
        records=lambda: chain.from_iterable(part.records() for part in parts),
        notes=tuple(note for part in parts for note in part.notes),
    )


def _schema(source: Source) -> tuple[object, ...]:
    """Returns the schema of a source, without the order of the columns: records store values by name."""
    return source.kind, frozenset(source.columns), source.label


def _content(source: Source) -> str:
    if not source.columns:
        return "TFRecords"
    columns = ", ".join(f"{name or 'rows'} {dtype}{list(shape) or ''}" for name, dtype, shape in source.columns)
    return f"({columns})" + (f" with label {source.label!r}" if source.label else "")


def _labelled(source: Source, label: str) -> Source:
    names = [name for name, _, _ in source.columns if name]
    if label not in names or len(names) < 2:
        raise OptionError(
            explain(
                "`--label` must name one of at least two columns." + ("" if label in names else nearest(label, names)),
                received=f"--label {label}",
                expected=", ".join(names) if len(names) > 1 else "arrays by name (.npz) or CSV as SOURCE",
            )
        )
    return replace(source, label=label)


def _tfds(builder: Any, split: str) -> Source:
    pieces = pieces_of_split(builder, split)
    plain = "_".join(re.findall(r"[A-Za-z]\w*", re.sub(r"\[[^]]*\]", "", split)))

    def describe(folder: Path, files: Sequence[WrittenFile]) -> None:
        tfds = tfds_package()
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        naming = tfds.core.ShardedFileTemplate(
            data_dir=folder, template=template, dataset_name=builder.name, split=plain, filetype_suffix="tfrecord"
        )
        info = tfds.core.SplitInfo(
            name=plain,
            shard_lengths=[file.elements for file in files],
            num_bytes=sum(file.size_bytes for file in files),
            filename_template=naming,
        )
        tfds.folder_dataset.write_metadata(
            data_dir=folder,
            features=builder.info.features,
            split_infos=[info],
            version=str(builder.version),
            filename_template=template,
            check_data=False,
            supervised_keys=builder.info.supervised_keys,
        )

    def file_name(number: int, count: int) -> str:
        return f"{builder.name}-{plain}.tfrecord-{number:05d}-of-{count:05d}"

    name = f"{builder.info.full_name}, {split}"
    return Source(name, "tfds", (), count_elements(pieces), lambda: _records(pieces), file_name, describe)


def _records(pieces: Sequence[Piece]) -> Iterator[bytes]:
    for piece in pieces:
        yield from read_records(piece.path, piece.skip, None if piece.take == TO_THE_END else piece.take)


def _not_found(text: str) -> OptionError:
    return OptionError(
        explain(
            "SOURCE must be an existing .npz, .npy or CSV file, TFRecord files, a pattern that matches files, or a "
            "data set of tensorflow-datasets.",
            received=text,
        )
    )
