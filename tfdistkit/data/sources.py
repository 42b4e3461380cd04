"""What `tfdistkit data write` reads: arrays files, TFRecords, data sets of tensorflow-datasets; all as records."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.data.datasets_of_tfds import find_builder, pieces_of_split
from tfdistkit.data.files import from_files
from tfdistkit.data.pieces import Piece, count_elements
from tfdistkit.data.written import INDEX, WrittenFile, load_index, serialize_row, tfds_package
from tfdistkit.errors import OptionError, explain

_ARRAYS = (".npz", ".npy")
_TFDS = "tfds:"
_TFRECORDS = "*.tfrecord*"
# name/config:version
_TFDS_NAME = re.compile(r"[a-z]\w*(/[\w.+-]+)?(:[\d.*]+)?")

Columns = tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Source:
    """Records to write.

    Args:
        name: For people.
        kind: What a record is; see `WrittenIndex`.
        columns: For arrays; see `WrittenIndex`.
        elements: How many there are; None if nobody knows.
        records: Reads them, in order.
        file_name: Of the number of a file and how many there are.
        describe: Writes what belongs beside the files, if anything does: of their folder and of them.
    """

    name: str
    kind: str
    columns: Columns
    elements: int | None
    records: Callable[[], Iterator[bytes]]
    file_name: Callable[[int, int], str] = lambda number, count: f"data-{number:05d}-of-{count:05d}.tfrecord"
    describe: Callable[[Path, Sequence[WrittenFile]], None] | None = None


def open_source(text: str, split: str, data_dir: str | None) -> Source:
    """Finds out what the user means.

    Args:
        text: A `.npz` or `.npy` file; a TFRecord file, a pattern, or a folder of them; a prepared folder or a name of
            tensorflow-datasets (`tfds:name` where a file is called like that).
        split: Of tensorflow-datasets.
        data_dir: Of tensorflow-datasets.

    Raises:
        OptionError: if there is no such thing, or it cannot be read.
        MissingDependencyError: if it needs tensorflow-datasets, and that is not installed.
    """
    if text.startswith(_TFDS):
        return _tfds(find_builder(text.removeprefix(_TFDS), data_dir), split)
    if text.endswith(_ARRAYS):
        return _arrays(text)
    if os.path.exists(os.path.join(text, "dataset_info.json")):
        return _tfds(find_builder(text), split)
    if os.path.exists(os.path.join(text, INDEX)):
        index = load_index(text)
        records = from_files(text, tf.data.TFRecordDataset, policy="off").as_numpy_iterator
        return Source(text, index.kind, index.columns, index.elements, records)
    paths = [text] if os.path.isfile(text) else tf.io.gfile.glob(os.path.join(text, _TFRECORDS))
    paths = sorted(paths or tf.io.gfile.glob(text))
    if paths:
        return Source(text, "records", (), None, tf.data.TFRecordDataset(paths).as_numpy_iterator)
    if not _TFDS_NAME.fullmatch(text):
        raise _nothing(text)
    return _tfds(find_builder(text, data_dir), split)


def _arrays(path: str) -> Source:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = {"": loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}
    except FileNotFoundError:
        raise _nothing(path) from None
    except (OSError, ValueError, EOFError) as error:
        raise OptionError(
            explain(f"The arrays cannot be read: {error}.", received=path, expected="a file of np.save or np.savez")
        ) from error
    counts = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(counts.values())) != 1 or not all(array.ndim for array in arrays.values()):
        raise OptionError(
            explain("The arrays do not have equally many rows.", received=f"{counts} in {path}", expected="the same")
        )
    rows = next(iter(counts.values()))
    columns = tuple((name, _dtype_name(name, array), tuple(array.shape[1:])) for name, array in arrays.items())

    def records() -> Iterator[bytes]:
        return (serialize_row({name: np.asarray(array[i]) for name, array in arrays.items()}) for i in range(rows))

    return Source(path, "arrays", columns, rows, records)


def _dtype_name(name: str, array: np.ndarray) -> str:
    if array.dtype.kind in "SU":
        return "string"
    try:
        return str(tf.as_dtype(array.dtype.name).name)
    except TypeError:
        raise OptionError(
            explain(f"TensorFlow has no such dtype: the array {name!r}.", received=str(array.dtype))
        ) from None


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
        yield from tf.data.TFRecordDataset(piece.path).skip(piece.skip).take(piece.take).as_numpy_iterator()


def _nothing(text: str) -> OptionError:
    return OptionError(
        explain(
            "SOURCE is not there.",
            received=text,
            expected="an .npz or .npy file, TFRecord files, or a data set of tensorflow-datasets",
        )
    )
