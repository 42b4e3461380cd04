"""TFRecord files read to their last byte; errors name the file and the record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdistkit.errors import explain

# A record has its length (8 bytes), the checksum of that (4), its bytes, and their checksum (4).
_AROUND_RECORD = 16
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"


def read_records(path: str, skip: int = 0, take: int | None = None, elements: int | None = None) -> Iterator[bytes]:
    """Reads the records of a file, in order.

    TensorFlow names neither file nor record, and takes up to 11 bytes of a record that was cut off for the end.

    Args:
        path: The file; any file system that TensorFlow knows.
        skip: Records to leave out before.
        take: Records to read; None reads to the end, and compares with the size of the file.
        elements: How many it has to hold, with `take=None`.

    Raises:
        OSError: if the file is damaged.
    """
    position, size = skip, 0
    dataset = tf.data.TFRecordDataset(path).skip(skip).take(-1 if take is None else take)
    try:
        for record in dataset.as_numpy_iterator():
            yield record
            position += 1
            size += len(record) + _AROUND_RECORD
    except tf.errors.DataLossError as error:
        raise _damaged(path, position, _said(error)) from None
    except tf.errors.OpError as error:
        raise OSError(explain(f"A TFRecord file cannot be read: {_said(error)}.", received=path)) from None
    if take is not None:
        if position != skip + take:
            raise _damaged(path, position, f"it ends there, {skip + take - position} records too early")
        return
    if not skip and (rest := tf.io.gfile.stat(path).length - size):
        raise _damaged(path, position, f"it is cut off after {rest} of its bytes")
    if elements not in (None, position):
        raise _damaged(path, position, f"the file has {position} records, its index says {elements}")


def read_in_order(paths: Sequence[str]) -> Iterator[bytes]:
    """Reads files one after the other.

    Args:
        paths: The files.
    """
    for path in paths:
        yield from read_records(path)


def read_turns(paths: Sequence[str], elements: Sequence[int]) -> Iterator[bytes]:
    """Reads files in turns, a record of each, as `tfdistkit data write` wrote them.

    Args:
        paths: The files.
        elements: How many records each of them has.
    """
    longest = sorted(zip(paths, elements), key=lambda pair: -pair[1])
    turns = [read_records(path, elements=count) for path, count in longest]
    ended = object()
    while turns:
        still = []
        for turn in turns:
            record = next(turn, ended)
            if isinstance(record, bytes):
                yield record
                still.append(turn)
        turns = still


def _damaged(path: str, position: int, said: str) -> OSError:
    return OSError(
        explain(
            f"A TFRecord file is damaged: record {position} (from 0): {said}.",
            received=path,
            expected="whole TFRecords, not compressed",
            do=_advice(path),
        )
    )


def _advice(path: str) -> str:
    with tf.io.gfile.GFile(path, "rb") as file:
        begins = file.read(4)
    if begins.startswith(_GZIP):
        return "It looks like a gzip file: decompress it with `gunzip`."
    if begins.startswith(_ZIP):
        return "It looks like a zip file: give arrays the name *.npz."
    return "Copy or write the file again, or leave it out; if it holds no TFRecords, name other files."


def _said(error: tf.errors.OpError) -> str:
    """TensorFlow's words without the place in its own graph."""
    text = re.sub(r"\{\{.*?\}\}|\[Op:.*", "", error.message)
    return text.strip().rstrip(".") or type(error).__name__
