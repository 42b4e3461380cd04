"""One file with all that a training needs to go on: JSON and arrays in a zip archive, which has a checksum of each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import zipfile
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistkit.callbacks.backup.plain_data import decode, encode
from tfdistkit.callbacks.checkpoints.atomic import whole_file
from tfdistkit.errors import UnsupportedError, explain

_FORM = 1
_STATE = "state.json"
# What every backup of a training holds.
PARTS = {"data", "model", "callbacks", "logs", "stopped"}


def previous_of(path: str) -> str:
    """Returns where the backup before the newest is kept."""
    return f"{path}.previous"


def write_backup(path: str, content: dict[str, Any], keep_previous: bool = True) -> None:
    """Writes plain data into a file that is there whole or not at all.

    Args:
        path: The file; its folder is made if it is missing.
        content: The data.
        keep_previous: Whether the file that was there is kept as the one before; if not, the one before it stays.

    Raises:
        OSError: if it cannot be written; what was there before stays.
    """
    arrays: list[np.ndarray] = []
    coded = encode(content, arrays)
    specs = [[array.dtype.name, list(array.shape)] for array in arrays]
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with whole_file(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as file:
            file.writestr(_STATE, json.dumps({"form": _FORM, "content": coded, "arrays": specs}))
            for i, array in enumerate(arrays):
                with file.open(str(i), "w", force_zip64=True) as entry:
                    entry.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.close()
            if keep_previous:
                _keep_previous(path)
    except OSError as error:
        message = explain(
            "The backup could not be written; the one that was there before is unchanged.",
            received=f"{type(error).__name__}: {error}, for {os.path.abspath(path)!r}",
            expected="a folder that the chief may write to, with enough free space",
        )
        raise (OSError(message) if error.errno is None else OSError(error.errno, message)) from error


def read_backup(data: bytes, path: str) -> dict[str, Any]:
    """Returns what `write_backup` was given.

    Args:
        data: The bytes of the file.
        path: Its name, for errors.

    Raises:
        UnsupportedError: if the file is damaged, or of another version.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            head = json.loads(file.read(_STATE))
            form, content = head["form"], dict[str, Any]()
            if form == _FORM:
                arrays = [_array(file.read(str(i)), *spec) for i, spec in enumerate(head["arrays"])]
                content = decode(head["content"], arrays)
                if not PARTS <= set(content):
                    raise ValueError("it is no backup of a training")
    except Exception as error:  # Bytes can be wrong in many ways, and each has an exception of its own.
        raise UnsupportedError(
            explain(
                "The backup is damaged.",
                received=f"{os.path.abspath(path)!r}, {len(data)} bytes: {error}",
                do="Remove it to train from the beginning, or put a copy of it there.",
            )
        ) from error
    if form != _FORM:
        raise UnsupportedError(
            explain(
                "The backup is of another version of tfdistkit.",
                received=os.path.abspath(path),
                do="Go on with the version that wrote it, or remove it.",
            )
        )
    return content


def _keep_previous(path: str) -> None:
    """Keeps what is there, under the name of the one before, while it also stays under its own."""
    new = f"{previous_of(path)}.new"
    with contextlib.suppress(FileNotFoundError):
        os.remove(new)
    try:
        os.link(path, new)
    except FileNotFoundError:
        return
    except OSError:  # A file system without hard links.
        os.replace(path, previous_of(path))
        return
    os.replace(new, previous_of(path))
    with contextlib.suppress(FileNotFoundError):
        os.remove(new)  # Two names of one file are not replaced by each other.


def _array(data: bytes, dtype: str, shape: list[int]) -> np.ndarray:
    # TensorFlow knows bfloat16 and the float8s, which NumPy does not.
    kind = np.dtype(dtype) if dtype in np.sctypeDict else np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    return np.frombuffer(data, kind).reshape(shape)
