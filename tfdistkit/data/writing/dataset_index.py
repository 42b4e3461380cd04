"""The output of `tfdistkit data write`: TFRecord files and an index of their contents."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.data.loading.file_shards import Piece
from tfdistkit.errors import MissingDependencyError, OptionError, explain
from tfdistkit.supported import INSTALL_TFDS

INDEX = "index.json"
_FORMAT = "tfdistkit-tfrecords-1"
# `tf.io.decode_raw` lacks these dtypes: decode the signed one, then bitcast.
_DECODED_AS = {"uint32": "int32", "uint64": "int64"}


@dataclass(frozen=True)
class WrittenFile:
    """The index entry of one file.

    Args:
        name: Its name in the folder.
        elements: The number of its records.
        size_bytes: Its size.
        checksum: See `Checksum`.
    """

    name: str
    elements: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class WrittenIndex:
    """The index of a folder of TFRecord files.

    Args:
        source: The source of the data, as text for the user.
        kind: The content of a record: `arrays` (see `columns`), `tfds` (an example of tensorflow-datasets, whose
            features are stored beside the index) or `records` (the bytes of the source).
        columns: For `arrays`: name, dtype and shape of each column; a single column without a name is the element.
        files: The files, in order.
        label: For `arrays`: the label column; elements are then (dict of the other columns, label).
    """

    source: str
    kind: str
    columns: tuple[tuple[str, str, tuple[int, ...]], ...]
    files: tuple[WrittenFile, ...]
    label: str | None = None

    @property
    def elements(self) -> int:
        """The number of elements in all files."""
        return sum(file.elements for file in self.files)

    def save(self, folder: Path) -> None:
        """Writes the index.

        Args:
            folder: Where the files are.
        """
        text = json.dumps({"format": _FORMAT, "elements": self.elements, **asdict(self)}, indent=1)
        (folder / INDEX).write_text(text + "\n")

    def pieces(self, folder: str) -> list[Piece]:
        """Returns the files as ranges to read.

        Args:
            folder: Where they are.
        """
        return [Piece(f"{folder.rstrip('/')}/{file.name}", 0, file.elements) for file in self.files]


class Checksum:
    """Hashes the records of a file: their lengths, bytes and order."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, record: bytes) -> None:
        """Adds the next record.

        Args:
            record: Its bytes.
        """
        self._hash.update(len(record).to_bytes(8, "little"))
        self._hash.update(record)

    def text(self) -> str:
        """Returns the checksum as hexadecimal text."""
        return self._hash.hexdigest()


def load_index(folder: str) -> WrittenIndex:
    """Reads the index of a folder.

    Args:
        folder: The folder; any file system that TensorFlow knows.

    Raises:
        OptionError: if it holds no index of `tfdistkit data write`, or one of an unknown format.
    """
    path = f"{folder.rstrip('/')}/{INDEX}"
    try:
        with tf.io.gfile.GFile(path) as file:
            stored = json.loads(file.read())
        if stored.get("format") != _FORMAT:
            raise ValueError(f"format {stored.get('format')!r}")
        files = tuple(WrittenFile(**file) for file in stored["files"])
        columns = tuple((name, dtype, tuple(shape)) for name, dtype, shape in stored["columns"])
        return WrittenIndex(stored["source"], stored["kind"], columns, files, stored.get("label"))
    except (tf.errors.OpError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            explain(
                f"The index of a data set cannot be read: {str(error).splitlines()[0].rstrip('.')}.",
                received=path,
                expected="a folder written by `tfdistkit data write`",
            )
        ) from error


def serialize_row(row: dict[str, np.ndarray]) -> bytes:
    """Serializes one row of some arrays as a tf.train.Example with the raw bytes of each value.

    Args:
        row: The values, by name.
    """
    features = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=_raw(v))) for name, v in row.items()}
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(example.SerializeToString(deterministic=True))


def _raw(value: np.ndarray) -> list[bytes]:
    """Returns one bytes value per string, or a single one for an array of numbers."""
    if value.dtype.kind in "SU":
        return [one if isinstance(one, bytes) else str(one).encode() for one in value.ravel()]
    return [value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()]


def parser_of(index: WrittenIndex, folder: str) -> Any:
    """Returns the parser of records, `parse(serialized) -> element`; None if the records are the elements.

    Args:
        index: The index of the folder.
        folder: The folder.

    Raises:
        MissingDependencyError: if the records are examples of tensorflow-datasets, and it is not installed.
    """
    if index.kind == "records":
        return None
    if index.kind == "tfds":
        return tfds_package().features.FeatureConnector.from_config(folder).deserialize_example
    specs = {name: _feature_spec(dtype, shape) for name, dtype, shape in index.columns}

    def parse(serialized: Any) -> Any:
        example = tf.io.parse_single_example(serialized, specs)
        values = {name: _value(example[name], dtype, shape) for name, dtype, shape in index.columns}
        if index.label is not None:
            label = values.pop(index.label)
            return values, label
        return values[""] if set(values) == {""} else values

    return parse


def _feature_spec(dtype: str, shape: tuple[int, ...]) -> Any:
    count = [int(np.prod(shape))] if dtype == "string" else []
    return tf.io.FixedLenFeature(count, tf.string)


def _value(raw: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    if dtype == "string":
        return tf.reshape(raw, shape)
    carrier = _DECODED_AS.get(dtype, dtype)
    value = tf.reshape(tf.io.decode_raw(raw, tf.as_dtype(carrier)), shape)
    return value if carrier == dtype else tf.bitcast(value, tf.as_dtype(dtype))


def tfds_package() -> Any:
    """Imports tensorflow-datasets on first use, because the import takes a second.

    Raises:
        MissingDependencyError: if it is not installed.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise MissingDependencyError(
            explain(
                f"tensorflow-datasets cannot be imported: {error}.",
                do=f"Install it with its dependencies: {INSTALL_TFDS}",
            )
        ) from error
    return tensorflow_datasets
