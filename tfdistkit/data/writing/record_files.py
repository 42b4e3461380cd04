"""Reads TFRecord files to their last byte; errors name the file and the record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdistkit.errors import explain

# Framing of a record: its length (8 bytes), the checksum of the length (4), and the checksum of its bytes (4).
_FRAME_BYTES = 16
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"


def read_records(path: str, skip: int = 0, take: int | None = None, elements: int | None = None) -> Iterator[bytes]:
    """Reads the records of a file, in order.

    TensorFlow's errors name neither file nor record, and it ignores a truncated record of up to 11 bytes.

    Args:
        path: The file; any file system that TensorFlow knows.
        skip: Records to skip.
        take: Records to read; None reads to the end, and checks the size of the file.
        elements: The expected number of records, with `take=None`.

    Raises:
        OSError: if the file is damaged.
    """
    position, size = skip, 0
    dataset = tf.data.TFRecordDataset(path).skip(skip).take(-1 if take is None else take)
    try:
        for record in dataset.as_numpy_iterator():
            yield record
            position += 1
            size += len(record) + _FRAME_BYTES
    except tf.errors.DataLossError as error:
        raise _damaged(path, position, _message(error)) from None
    except tf.errors.OpError as error:
        raise OSError(explain(f"A TFRecord file cannot be read: {_message(error)}.", received=path)) from None
    if take is not None:
        if position != skip + take:
            raise _damaged(path, position, f"the file ends there, {skip + take - position} records too early")
        return
    if not skip and (rest := tf.io.gfile.stat(path).length - size):
        raise _damaged(path, position, f"it is cut off after {rest} of its bytes")
    if elements not in (None, position):
        raise _damaged(path, position, f"the file has {position} records, its index has {elements}")


def read_in_order(paths: Sequence[str]) -> Iterator[bytes]:
    """Reads files one after the other.

    Args:
        paths: The files.
    """
    for path in paths:
        yield from read_records(path)


def read_interleaved(paths: Sequence[str], elements: Sequence[int]) -> Iterator[bytes]:
    """Reads files interleaved, one record of each at a time, as `tfdistkit data write` wrote them.

    Args:
        paths: The files.
        elements: The number of records of each file.
    """
    longest = sorted(zip(paths, elements), key=lambda pair: -pair[1])
    readers = [read_records(path, elements=count) for path, count in longest]
    ended = object()
    while readers:
        unfinished = []
        for reader in readers:
            record = next(reader, ended)
            if isinstance(record, bytes):
                yield record
                unfinished.append(reader)
        readers = unfinished


def _damaged(path: str, position: int, damage: str) -> OSError:
    return OSError(
        explain(
            f"A TFRecord file is damaged: record {position} (from 0): {damage}.",
            received=path,
            expected="complete, uncompressed TFRecords",
            do=_advice(path),
        )
    )


def _advice(path: str) -> str:
    with tf.io.gfile.GFile(path, "rb") as file:
        begins = file.read(4)
    if begins.startswith(_GZIP):
        return "Decompress it with `gunzip`: it looks like a gzip file."
    if begins.startswith(_ZIP):
        return "Rename it to *.npz if it holds arrays: it looks like a zip file."
    return "Copy or write the file again, or leave it out; if it holds no TFRecords, name other files."


def _message(error: tf.errors.OpError) -> str:
    """Returns TensorFlow's message without the name of the node."""
    text = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", error.message)
    return text.strip().rstrip(".") or type(error).__name__
