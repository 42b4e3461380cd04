"""What `tfdistkit data write` leaves: TFRecords and an index that says what is in them."""

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
# What TensorFlow does not decode, and what has its bits.
_DECODED_AS = {"uint32": "int32", "uint64": "int64"}


@dataclass(frozen=True)
class WrittenFile:
    """One file.

    Args:
        name: Its name in the folder.
        elements: Its records.
        size_bytes: Its size.
        checksum: See `Checksum`.
    """

    name: str
    elements: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class WrittenIndex:
    """A folder of files.

    Args:
        source: What they were made of, for people.
        kind: What a record is: `arrays` (see `columns`), `tfds` (an example of tensorflow-datasets, whose features are
            beside the index) or `records` (whatever the source had).
        columns: For `arrays`: name, dtype and shape of each; one without a name is the element itself.
        files: The files, in order.
        label: For `arrays`: the column that is the label; then elements are (dict of the others, label).
    """

    source: str
    kind: str
    columns: tuple[tuple[str, str, tuple[int, ...]], ...]
    files: tuple[WrittenFile, ...]
    label: str | None = None

    @property
    def elements(self) -> int:
        """How many there are in all files."""
        return sum(file.elements for file in self.files)

    def save(self, folder: Path) -> None:
        """Writes the index.

        Args:
            folder: Where the files are.
        """
        text = json.dumps({"format": _FORMAT, "elements": self.elements, **asdict(self)}, indent=1)
        (folder / INDEX).write_text(text + "\n")

    def pieces(self, folder: str) -> list[Piece]:
        """Returns the files as they are read.

        Args:
            folder: Where they are.
        """
        return [Piece(f"{folder.rstrip('/')}/{file.name}", 0, file.elements) for file in self.files]


class Checksum:
    """Of the records of a file: their lengths, their bytes, their order."""

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
        """Returns it as text."""
        return self._hash.hexdigest()


def load_index(folder: str) -> WrittenIndex:
    """Reads the index of a folder.

    Args:
        folder: The folder; any file system that TensorFlow knows.

    Raises:
        OptionError: if it holds no index of ours, or one that this version cannot read.
    """
    path = f"{folder.rstrip('/')}/{INDEX}"
    try:
        with tf.io.gfile.GFile(path) as file:
            told = json.loads(file.read())
        if told.get("format") != _FORMAT:
            raise ValueError(f"format {told.get('format')!r}")
        files = tuple(WrittenFile(**file) for file in told["files"])
        columns = tuple((name, dtype, tuple(shape)) for name, dtype, shape in told["columns"])
        return WrittenIndex(told["source"], told["kind"], columns, files, told.get("label"))
    except (tf.errors.OpError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            explain(
                f"The index of a data set cannot be read: {str(error).splitlines()[0].rstrip('.')}.",
                received=path,
                expected="a folder written by `tfdistkit data write`",
            )
        ) from error


def serialize_row(row: dict[str, np.ndarray]) -> bytes:
    """Makes a record of one row of some arrays: a tf.train.Example with the raw bytes of each.

    Args:
        row: The values, by name.
    """
    features = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=_raw(v))) for name, v in row.items()}
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(example.SerializeToString(deterministic=True))


def _raw(value: np.ndarray) -> list[bytes]:
    """Strings one by one, numbers in one piece."""
    if value.dtype.kind in "SU":
        return [one if isinstance(one, bytes) else str(one).encode() for one in value.ravel()]
    return [value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()]


def parser_of(index: WrittenIndex, folder: str) -> Any:
    """Returns what makes an element of a record: `parse(serialized) -> element`; None leaves records as they are.

    Args:
        index: What is in the folder.
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
    """Imports tensorflow-datasets, which takes a second.

    Raises:
        MissingDependencyError: if it is not installed.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise MissingDependencyError(
            explain(
                f"tensorflow-datasets cannot be imported: {error}.",
                do=f"Install it with what it needs: {INSTALL_TFDS}",
            )
        ) from error
    return tensorflow_datasets
